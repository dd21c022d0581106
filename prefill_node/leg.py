"""The prefill leg of requests: compute the prompt, sample one token, hand the KV over.

Owns the set of the router's requests that are alive at this node, and which of them are still wanted. Choices of one
prompt are computed and handed over together, as long as one of them is wanted. The engine holds the blocks, and the
sending side (on the transfer thread) owns the handoffs. This module connects the two: it posts commands to the sending
side and takes its notices in `poll`. A request ends here when the sending side says that its blocks are released.

The blocks of a prompt that a step completes are pushed layer by layer while the step runs. Such a prompt fails when its
step fails, even if the engine could compute it again, because some of its KV has been pushed already.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from prometheus_client.core import Metric

from baton.engine.attention.base import LayerStored
from baton.engine.cache.hashing import prompt_digest
from baton.engine.core import EngineCore
from baton.engine.scheduler.step import RequestOutput, Step
from baton.kvtransfer.commands import (
    BeginHandoff,
    CancelSending,
    FinishHandoff,
    PushComputed,
    PushLayers,
    Rejected,
    SendingNotice,
)
from baton.kvtransfer.layers import LayerProgress
from baton.kvtransfer.sending_end import SendingEnd
from baton.node.choices import choice_keys
from baton.node.events import token_event
from baton.node.first_steps import FirstSteps
from baton.node.metrics import StepCounters, counters_as_metrics
from baton.wire.errors import BatonError, InvalidMessage, RequestFailed
from baton.wire.messages.legs import HandOver, Prefill
from baton.wire.messages.output import TokenEvent
from baton.wire.request_key import RequestKey


@dataclass(slots=True)
class _Prompt:
    """A prompt and its handoff. `choices`: the first of them names the handoff; `wanted` are those that nobody has
    cancelled and that have not failed."""

    choices: tuple[RequestKey, ...]
    wanted: set[RequestKey]

    @property
    def handoff(self) -> RequestKey:
        """What the prompt is called in the engine and between the nodes."""
        return self.choices[0]


@dataclass(frozen=True, slots=True)
class _WatchedStep:
    """A step in flight, and the prompts that it completes."""

    layers: LayerProgress
    ending: list[RequestKey]


class PrefillLeg:
    """The prefill leg of a node's requests. `end` is its sending side; `layer_ends` says where layers end in a block
    (see `KvLayout`). `first_steps` holds the prompts whose first token is still to come. `counters` are those of
    another leg that counts the same steps and shows them; None for its own."""

    def __init__(
        self,
        core: EngineCore,
        end: SendingEnd,
        layer_ends: Sequence[int],
        first_steps: FirstSteps,
        counters: StepCounters | None = None,
    ) -> None:
        self._core = core
        self._end = end
        self._thread = end.thread
        self._layer_ends = layer_ends
        self._prompts: dict[RequestKey, _Prompt] = {}
        self._prompt_of: dict[RequestKey, _Prompt] = {}
        self._failures: list[tuple[RequestKey, BatonError]] = []
        self._finished: list[TokenEvent] = []
        self._watched: deque[_WatchedStep] = deque()
        self._counts_steps = counters is None
        self._counters = StepCounters() if counters is None else counters
        self._first_steps = first_steps

    @property
    def num_live(self) -> int:
        """Number of prompts that are computed now and of handoffs that are not released yet."""
        return len(self._prompts)

    @property
    def keys(self) -> Collection[RequestKey]:
        """The attempts of all choices whose blocks are held here, wanted or not."""
        return self._prompt_of.keys()

    def live_keys(self) -> Iterable[RequestKey]:
        """The keys of all prompts whose blocks are not released yet."""
        return self._prompt_of

    def wait_on(self) -> Sequence[Any]:
        """The socket that wakes for notices of the sending side."""
        return [self._end.notices.wakeup]

    def begin(self, request: Any, now_s: float) -> None:
        """Compute a prompt for a handoff. Raises `BatonError`."""
        if not isinstance(request, Prefill):
            raise InvalidMessage(f"a prefill node cannot serve {type(request).__name__}")
        key, *forks = choices = choice_keys(request)
        if any(choice in self._prompt_of for choice in choices):
            raise InvalidMessage("this attempt of the handoff exists already")
        self._core.add(
            key,
            request.prompt,
            request.params,
            output_ids=request.output_ids,
            first_token_only=True,
            forks=forks,
        )
        self._prompts[key] = prompt = _Prompt(choices, set(choices))
        self._prompt_of |= dict.fromkeys(choices, prompt)
        self._first_steps.watch(key, num_tokens=1)
        self._thread.post(
            BeginHandoff(
                key=key,
                decode_node_id=request.decode_node_id,
                decode_epoch=request.decode_epoch,
                num_tokens=request.num_tokens,
                prompt_digest=prompt_digest(request.prompt, request.output_ids),
            )
        )

    def hand_over(self, order: HandOver, now_s: float) -> int:
        """0: a prefill node generates nothing that could be handed over."""
        return 0

    def cancel(self, key: RequestKey, now_s: float) -> None:
        """Stop one choice. The handoff of its prompt is cancelled with the last of its choices."""
        prompt = self._prompt_of.get(key)
        if prompt is not None and key in prompt.wanted:
            prompt.wanted.remove(key)
            if not prompt.wanted:
                self._thread.post(CancelSending(prompt.handoff, "cancelled"))

    def cancel_all(self, now_s: float, owner: bytes = b"") -> None:
        """Cancel the choices whose id begins with `owner`, and report them as failed."""
        wanted = [key for key, prompt in self._prompt_of.items() if key in prompt.wanted]
        for key in [key for key in wanted if key.handoff_id.startswith(owner)]:
            self.cancel(key, now_s)
            self._failures.append((key, RequestFailed("the router was silent for too long")))

    def poll(self, now_s: float) -> None:
        """Take the notices of the sending side. Raises `BatonError` when the transfer thread has ended."""
        self._thread.require_alive()
        for notice in self._end.notices.take():
            self.take_notice(notice)

    def take_notice(self, notice: SendingNotice) -> None:
        """The sending side is done with a handoff. One of others is left alone."""
        prompt = self._prompts.pop(notice.key, None)
        if prompt is None:
            return
        for choice in prompt.choices:
            self._core.abort(choice)
            del self._prompt_of[choice]
        self._core.handoffs.release(notice.key)
        self._first_steps.forget(notice.key)
        if isinstance(notice, Rejected):
            self._fail_choices(prompt, InvalidMessage(notice.reason))

    def watch(self, step: Step) -> LayerStored | None:
        """Begin to push the prompts that the step completes, layer by layer. Returns what counts the layers, if there
        are any."""
        self._first_steps.step_begins()
        layers = LayerProgress(self._layer_ends, self._thread.wake)
        ending: list[RequestKey] = []
        for share in step.requests:
            if share.needs_sample:
                ending.append(share.key)
                self._thread.post(PushLayers(share.key, tuple(share.block_table), layers))
        self._watched.append(_WatchedStep(layers, ending))
        return layers.count if ending else None

    def applied(self, outputs: Sequence[RequestOutput], now_s: float) -> list[TokenEvent]:
        """Push the blocks that the step completed. Token 1 of each finished prompt goes straight to the router."""
        self._first_steps.step_ends()
        if self._watched:
            self._watched.popleft()
        self._counters.count(outputs, is_step=self._counts_steps)
        self._finished = []
        for output in outputs:
            times = self._first_steps.times_of(output)
            if output.has_failed:
                continue
            event = token_event(output, times)
            if event is not None:
                self._finished.append(event)
            else:
                table = tuple(self._core.handoffs.block_table(output.key))
                self._thread.post(PushComputed(output.key, table, output.num_computed_tokens))
        return self._finished

    def sent(self, now_s: float) -> None:
        """Token 1 was sent to the router: push the rest and commit, unless it has ended every choice."""
        firsts: dict[RequestKey, list[TokenEvent]] = {}
        for event in self._finished:
            prompt = self._prompt_of[RequestKey(event.handoff_id, event.attempt)]
            firsts.setdefault(prompt.handoff, []).append(event)
        for key, events in firsts.items():
            if all(event.finish_reason for event in events):
                reason = "the first token ended the request"
                self._thread.post(CancelSending(key, reason, request_ended=True))
            else:
                table = tuple(self._core.handoffs.block_table(key))
                num_drafted = self._core.handoffs.num_drafted(table)
                self._thread.post(FinishHandoff(key, table, tuple(events), now_s, num_drafted))
        self._finished = []

    def lost(self, error: BatonError, now_s: float) -> None:
        """Fail the prompts in flight. Layers that are not stored by now never will be, and the stored ones may be
        wrong."""
        self._first_steps.steps_lost()
        while self._watched:
            step = self._watched.popleft()
            step.layers.abandon()
            for key in step.ending:
                self.fail(key, error, now_s)

    def take_failures(self) -> list[tuple[RequestKey, BatonError]]:
        """The choices that failed since the last call, with their errors."""
        failures, self._failures = self._failures, []
        return failures

    def fail(self, key: RequestKey, error: BatonError, now_s: float) -> None:
        """Fail all choices of the prompt, and cancel its handoff. Its blocks are held until nothing reads them."""
        # its blocks are held until nothing reads them; until then it may be in more steps, and fail again
        prompt = self._prompt_of.get(key)
        if prompt is not None and prompt.wanted:
            self._fail_choices(prompt, error)
            self._thread.post(CancelSending(prompt.handoff, str(error)))

    def _fail_choices(self, prompt: _Prompt, error: BatonError) -> None:
        self._failures += [(choice, error) for choice in prompt.choices if choice in prompt.wanted]
        prompt.wanted.clear()

    def metrics(self) -> Iterable[Metric]:
        """The counts of this leg, and those of its sending side."""
        yield from self._counters.metrics()
        help_text = "Handoffs sent by this node, since its start"
        yield from counters_as_metrics("baton:kv_send_", help_text, asdict(self._end.side.counters))
