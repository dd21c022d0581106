"""What follows from a token that was sampled: whether it ends its request, and which tokens a grammar forces behind it.

Owns the rules of an end, and jumping ahead: a token that is the only one which the grammar allows would be sampled in
any case, so it is taken without a step of its own, and computed with the next one as a chunk. The tokens of an output
are those that it would have without jumping; only steps are saved.

Requests that need more of a token than its id do not jump: log probabilities are those of the model at its place, and
where only some tokens are allowed the forced one may not be among them.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from baton.engine.scheduler.request import MAX_FORCED, Request, RequestOutput
from baton.wire.messages import FINISH_COMPLETE, FINISH_LENGTH, FINISH_STOP

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
        if matcher is None or output.token is None or output.has_left or not self._can_jump(request):
            return output
        token_id = matcher.forced_token()
        if token_id is None:
            return output
        forced: list[int] = []
        finish_reason, deadline_s = "", self._clock() + MAX_JUMP_S
        while token_id is not None:
            forced.append(token_id)
            request.token_ids.append(token_id)
            finish_reason = self.finish_reason(request)
            if finish_reason or len(forced) == MAX_FORCED or self._clock() > deadline_s:
                break
            token_id = matcher.forced_token()
        return output._replace(forced=tuple(forced), finish_reason=finish_reason, has_left=bool(finish_reason))

    def _can_jump(self, request: Request) -> bool:
        params = request.params
        return self._jumps_ahead and params.logprobs is None and not params.allowed_token_ids
