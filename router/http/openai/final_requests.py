"""From a request and its prompts to what the relay is asked for: one ordered stage, passed once.

Owns the order of the checks that need token ids: what the request says by itself, then its grammar, then what only
nodes know. Nothing has been allocated before the last of them, but for the payload of media. Knows no answer and no
stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from aiohttp import web

from baton.router.http.access.guard import IDENTITY
from baton.router.http.access.identity import cache_salt_of
from baton.router.http.openai.fields import UNSUPPORTED
from baton.router.http.openai.ignored import IgnoredFields
from baton.router.http.openai.latency_goals import asked_goals
from baton.router.http.openai.prompts import truncated
from baton.router.http.openai.schemas import MAX_CHOICES, GenerationRequest
from baton.router.http.resume.requests import seed_of_stream
from baton.router.http.served_model import ServedModel
from baton.router.requests.attempt import RelayRequest
from baton.router.requests.relay import Relay
from baton.router.routing.goals import NO_GOALS, AllowedGoals, Goals
from baton.wire.errors import InvalidRequest
from baton.wire.media import Medium
from baton.wire.prompt import Prompt
from baton.wire.sampling import MAX_PREDICTION_TOKENS, DecodingParams

MAX_HELD_TOKENS = 2**22
MAX_HELD_LOGPROBS = 2**20
"""An answer that is not streamed stays in memory until its last token. Text is cheap and log probabilities are not, so
each has a limit of its own."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A validated request to a model, with the token ids of its prompts. `param`: the field that prompts come from.
    `echoes`: their texts, where they are echoed. `media`: those of the only prompt, with payload."""

    model: ServedModel
    request: GenerationRequest
    prompts: Sequence[Sequence[int]]
    param: str
    echoes: Sequence[str] = ()
    media: Sequence[Medium] = ()

    @property
    def num_choices(self) -> int:
        """The choices of all prompts, also those that the client does not see."""
        return len(self.prompts) * self.request.num_candidates


@dataclass(frozen=True, slots=True)
class FinalRequests:
    """The stage. `goals`: those that the router has and allows, None without any. `max_model_len`: of a model, as its
    nodes or the operator say; None while neither does."""

    relay: Relay
    goals: AllowedGoals | None
    max_model_len: Callable[[str], int | None]

    async def of(self, asked: Asked, http: web.Request, notes: IgnoredFields) -> list[RelayRequest]:
        """One request for each prompt, with the parameters that nodes get. May wait for a first node.

        Raises `InvalidRequest`, `ContextLengthExceeded`, and `NoNode` when none joins.
        """
        name = asked.model.name
        goals = asked_goals(asked.request, http.headers, self.goals, notes)
        params = await self._with_grammar(asked, _own_params(asked, goals, seed_of_stream(http)))
        params = await self._with_prediction(asked, params)
        _check_number(asked)
        await self.relay.node_wait.for_any_node(name)
        if asked.media:
            self._require_computed(asked)
        max_model_len = self.max_model_len(name)
        salt = cache_salt_of(http.get(IDENTITY), asked.request.cache_salt)
        prompts = [
            Prompt.of(truncated(asked.request, prompt_ids, max_model_len), salt, asked.media)
            for prompt_ids in asked.prompts
        ]
        if not asked.request.stream:
            room = (max_model_len or 0) - max(prompt.num_tokens for prompt in prompts)
            params = bounded(params, asked.num_choices, room, asked.request.output_limit[0])
        found = [
            RelayRequest(name, prompt, self._within_context(asked, params, prompt), goals=goals) for prompt in prompts
        ]
        num_prompt_tokens = sum(prompt.num_tokens for prompt in prompts)
        asked.request.prompt_options.check_size(num_prompt_tokens * asked.request.num_candidates)
        return found

    async def _with_grammar(self, asked: Asked, params: DecodingParams) -> DecodingParams:
        max_model_len = self.max_model_len(asked.model.name)
        room = None if max_model_len is None else max_model_len - len(asked.prompts[0])
        limits = [limit for limit in (params.max_tokens, room) if limit is not None]
        grammar = await asked.model.prompts.grammar(asked.request, asked.prompts[0], limits)
        return params if grammar is None else replace(params, grammar=grammar)

    async def _with_prediction(self, asked: Asked, params: DecodingParams) -> DecodingParams:
        most = min(self.max_model_len(asked.model.name) or MAX_PREDICTION_TOKENS, MAX_PREDICTION_TOKENS)
        ids = await asked.model.prompts.prediction_ids(asked.request, most)
        return replace(params, prediction_ids=ids) if ids else params

    def _require_computed(self, asked: Asked) -> None:
        """Raise `InvalidRequest` for media that no node of the model computes, or that would be cut."""
        for kind in {medium.kind for medium in asked.media}:
            if not self.relay.takes_media(asked.model.name, kind):
                message = f"{asked.param}: the nodes of this model take no {kind} input"
                raise InvalidRequest(message, asked.param, UNSUPPORTED)
        if asked.request.truncate_prompt_tokens is not None:
            raise InvalidRequest(
                f"a prompt with {asked.media[0].kind} input is not truncated", "truncate_prompt_tokens"
            )

    def _within_context(self, asked: Asked, params: DecodingParams, prompt: Prompt) -> DecodingParams:
        name, media = asked.model.name, prompt.media_kinds
        most = self.relay.check_size(name, prompt.num_tokens, params.max_tokens, asked.param, media)
        return params.with_at_most(most)


def _own_params(asked: Asked, goals: Goals | None, seed: int | None) -> DecodingParams:
    """What the request says by itself, without its grammar. `seed`: of the stream that it resumes."""
    params = asked.model.defaults.limited(asked.request.decoding_params())
    wanted = goals or NO_GOALS
    params = replace(
        params,
        bad_word_ids=asked.model.prompts.bad_word_ids(asked.request),
        goal_ttft_s=wanted.ttft_s,
        goal_tpot_s=wanted.tpot_s,
        seed=params.seed if seed is None else seed,
    )
    params.check_vocabulary(asked.model.prompts.tokenizer.vocab_size)
    return params


def _check_number(asked: Asked) -> None:
    if asked.num_choices > MAX_CHOICES:
        name = "n" if asked.request.num_candidates == asked.request.n else "best_of"
        raise InvalidRequest(f"{asked.num_choices} choices over all prompts is more than {MAX_CHOICES}", name)


def bounded(params: DecodingParams, num_choices: int, room: int, limit_name: str) -> DecodingParams:
    """`params` for an answer of `num_choices` choices that is not streamed. `room`: the tokens that fit into the
    context behind the longest prompt; `limit_name`: what the client calls `max_tokens`. A request that names none is
    never refused: its choices end with "length" where the limit is.

    Raises `InvalidRequest` when choices x max_tokens, or with log probabilities choices x max_tokens x
    (1 + top_logprobs), is more than one answer may hold.
    """
    num_per_token = 0 if params.logprobs is None else 1 + params.logprobs
    most_tokens = MAX_HELD_TOKENS // num_choices
    if num_per_token:
        most_tokens = min(most_tokens, MAX_HELD_LOGPROBS // (num_choices * num_per_token))
    if params.max_tokens is None:
        return params if room <= most_tokens else replace(params, max_tokens=max(most_tokens, params.min_tokens))
    if params.max_tokens <= most_tokens:
        return params
    wanted = f"{num_choices} choices x {params.max_tokens} tokens"
    if num_per_token:
        what = f"{wanted} x {num_per_token} log probabilities is more than the {MAX_HELD_LOGPROBS}"
    else:
        what = f"{wanted} is more than the {MAX_HELD_TOKENS}"
    raise InvalidRequest(f"{limit_name}: {what} that an answer may hold; ask for less, or for a stream", limit_name)
