"""The choices of one answer: one relay request each, merged into one sequence of text deltas.

Owns the start, the order and the end of an answer's choices. Closing the merged sequence cancels what still runs.

Choices of one prompt share its KV through the prefix caches: the first one goes ahead, its siblings start when it has
its first token.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from engine.text.tokenizer import Tokenizer
from router.journal import Journal
from router.metrics import RequestTimer, RouterMetrics
from router.openai.responses import Usage
from router.openai.text_stream import ChoiceText, TextDelta, TextOptions
from router.relay import Relay
from wire.sampling import DecodingParams

_MAX_QUEUED_DELTAS = 256


@dataclass(slots=True)
class Choice:
    """One choice while it is generated. `may_start` is set when its prompt's KV is expected to be cached.

    `journal` is an empty one until the first tokens have come.
    """

    index: int
    prompt_ids: Sequence[int]
    params: DecodingParams
    text: ChoiceText
    may_start: asyncio.Event
    journal: Journal = field(default_factory=Journal)
    siblings_may_start: asyncio.Event = field(default_factory=asyncio.Event)


ChoiceDeltas: TypeAlias = AsyncGenerator[tuple[Choice, TextDelta], None]


@dataclass(frozen=True, slots=True)
class Answer:
    """All choices of one request, in order of their index."""

    choices: tuple[Choice, ...]
    num_prompts: int

    def usage(self) -> Usage:
        """Tokens so far: each prompt counted once."""
        firsts = self.choices[:: len(self.choices) // self.num_prompts]
        return Usage(
            num_prompt_tokens=sum(len(choice.prompt_ids) for choice in firsts),
            num_completion_tokens=sum(choice.text.num_completion_tokens for choice in self.choices),
            num_cached_tokens=sum(choice.journal.num_cached_tokens or 0 for choice in firsts),
            handoffs=[choice.journal.handoff for choice in self.choices if choice.journal.handoff is not None],
        )


def make_answer(
    prompts: Sequence[Sequence[int]],
    num_choices: int,
    params: DecodingParams,
    options: TextOptions,
    tokenizer: Tokenizer,
) -> Answer:
    """Choice c of prompt p has index p * num_choices + c. A request without a seed gets a random one."""
    seed = secrets.randbits(62) if params.seed is None else params.seed
    choices: list[Choice] = []
    for prompt_ids in prompts:
        first: Choice | None = None
        for number in range(num_choices):
            choice = Choice(
                index=len(choices),
                prompt_ids=prompt_ids,
                params=replace(params, seed=seed, choice=number),
                text=ChoiceText(tokenizer, options, prompt_ids),
                may_start=asyncio.Event() if first is None else first.siblings_may_start,
            )
            if first is None:
                first = choice
                choice.may_start.set()
            choices.append(choice)
    return Answer(tuple(choices), len(prompts))


async def generate(answer: Answer, relay: Relay, metrics: RouterMetrics) -> ChoiceDeltas:
    """Deltas of all choices as they come; ends when every choice has its finish reason. Raises what the relay does."""
    if len(answer.choices) == 1:
        async with aclosing(_run(answer.choices[0], relay, metrics)) as deltas:
            async for delta in deltas:
                yield answer.choices[0], delta
        return
    async with aclosing(_merge(answer, relay, metrics)) as merged:
        async for item in merged:
            yield item


async def _run(choice: Choice, relay: Relay, metrics: RouterMetrics) -> AsyncGenerator[TextDelta, None]:
    await choice.may_start.wait()
    timer = RequestTimer(metrics, len(choice.prompt_ids))
    try:
        async with aclosing(relay.generate(choice.prompt_ids, choice.params)) as deliveries:
            async for delivery, journal in deliveries:
                timer.tokens(len(delivery.token_ids))
                choice.siblings_may_start.set()
                choice.journal = journal
                delta = choice.text.push(delivery.token_ids, delivery.logprobs, delivery.finish_reason)
                if not delta.is_empty:
                    yield delta
                if choice.text.finish_reason is not None:
                    timer.finished(choice.text.finish_reason, choice.journal.times)
                    return  # closing the relay's iterator cancels what a stop string made superfluous
    finally:
        choice.siblings_may_start.set()


async def _merge(answer: Answer, relay: Relay, metrics: RouterMetrics) -> ChoiceDeltas:
    queue: asyncio.Queue[tuple[Choice, TextDelta] | BaseException | None] = asyncio.Queue(_MAX_QUEUED_DELTAS)

    async def pump(choice: Choice) -> None:
        try:
            async with aclosing(_run(choice, relay, metrics)) as deltas:
                async for delta in deltas:
                    await queue.put((choice, delta))
            await queue.put(None)
        except Exception as error:  # crosses to the task that writes the answer, which raises it
            await queue.put(error)

    tasks = [asyncio.create_task(pump(choice), name=f"choice-{choice.index}") for choice in answer.choices]
    num_running = len(tasks)
    try:
        while num_running:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
