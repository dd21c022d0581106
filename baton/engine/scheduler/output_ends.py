"""What follows from tokens that were sampled: which of them ends its request, and which tokens a grammar forces behind.

Owns the rules of an end, and jumping ahead: a token that is the only one which the grammar allows would be sampled in
any case, so it is taken without a step of its own, and computed with the next one as a chunk. The tokens of an output
are those that it would have without jumping; only steps are saved.

Requests that need more of a token than its id do not jump: log probabilities are those of the model at its place, and
where only some tokens are allowed the forced one may not be among them.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from baton.engine.scheduler.request import MAX_FORCED, Request
from baton.engine.scheduler.step import RequestOutput, SampledToken, SampledTokens
from baton.wire.messages.output import FINISH_COMPLETE, FINISH_LENGTH, FINISH_STOP

MAX_JUMP_S = 0.001
"""A jump that takes longer ends, and goes on behind the next step: everybody in the batch waits for it. When it ends
changes nothing in the output."""


class OutputEnds:
    """`jumps_ahead`: whether forced tokens are taken together. `clock`: seconds."""

    def __init__(
        self, eos_token_ids: frozenset[int], *, jumps_ahead: bool, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._eos_token_ids = eos_token_ids
        self._clock = clock
        self._jumps_ahead = jumps_ahead

    def take(self, request: Request, tokens: SampledTokens) -> tuple[SampledTokens, str]:
        """Make `tokens`, which were sampled, those of `request`: the first in the last known place, which is there
        already, and the others behind all. Those up to the first that ends the request, and why it does.

        Tokens behind drafts were drawn with a second matcher. The output's own has the last word on each of them: one
        that it refuses is drawn again in the next step."""
        request.token_ids[request.num_known_tokens - 1] = tokens[0].token_id
        finish_reason, num_taken = self.finish_reason(request), 1
        for token in tokens[1:]:
            if finish_reason or (request.matcher is not None and not request.matcher.accepts(token.token_id)):
                break
            request.token_ids.append(token.token_id)
            finish_reason, num_taken = self.finish_reason(request), num_taken + 1
        return tokens[:num_taken], finish_reason

    def finish_reason(self, request: Request) -> str:
        """Why the last known token of `request`, which is new, ends it, or ""."""
        params, num_tokens = request.params, len(request.token_ids) - request.num_pending_tokens
        last = request.token_ids[num_tokens - 1]
        is_end = (last in self._eos_token_ids and not params.ignore_eos) or last in params.stop_token_ids
        if is_end and num_tokens - request.num_prompt_tokens >= params.min_tokens:
            return FINISH_STOP
        if (matcher := request.matcher) is not None:
            matcher.take(last)
            if matcher.is_complete:
                return FINISH_COMPLETE
        return FINISH_LENGTH if num_tokens >= request.most_tokens else ""

    def jump(self, request: Request, output: RequestOutput) -> RequestOutput:
        """`output`, the newest of `request`, with the tokens that its grammar forces next; they are added to
        `request`, which no step in flight samples for."""
        matcher = request.matcher
        if matcher is None or not output.tokens or output.has_left or not self._can_jump(request):
            return output
        token_id = matcher.forced_token()
        if token_id is None:
            return output
        forced: list[SampledToken] = []
        finish_reason, deadline_s = "", self._clock() + MAX_JUMP_S
        while token_id is not None:
            forced.append(SampledToken(token_id, None))
            request.token_ids.append(token_id)
            finish_reason = self.finish_reason(request)
            if finish_reason or len(forced) == MAX_FORCED or self._clock() > deadline_s:
                break
            token_id = matcher.forced_token()
        tokens, has_left = (*output.tokens, *forced), bool(finish_reason)
        return output._replace(tokens=tokens, num_forced=len(forced), finish_reason=finish_reason, has_left=has_left)

    def _can_jump(self, request: Request) -> bool:
        params = request.params
        return self._jumps_ahead and params.logprobs is None and not params.allowed_token_ids
