"""What a scheduler takes: how much one step and one request may have, and what is refused before it waits.

Knows no blocks and no steps; which requests there are is the scheduler's knowledge.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from baton.engine.scheduler.request import Request
from baton.wire.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound, Overloaded
from baton.wire.media import num_payload_bytes
from baton.wire.prompt import Prompt

MAX_PAYLOAD_BYTES_HELD = 2**29
"""Of the media of all live requests, beyond which none is taken."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """`max_num_batched_tokens` is what prompts have in a step, beside the requests that decode; `max_request_tokens`
    bounds prompt plus output.

    Token ids lie below `vocab_size`: one that does not would fail the whole step it is computed in. `jumps_ahead`: the
    tokens that a grammar forces are computed as one chunk. `has_states`: a block that is not full holds a state, which
    only one sequence may use. `max_num_drafts`: in one step; 0: this model's states do not go back behind a wrong one.
    `num_stages`: see `LiveRequests.by_age`. `adapters`: digests of those that are loaded.
    """

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_request_tokens: int
    max_num_waiting: int = 4096
    vocab_size: int = 2**32
    jumps_ahead: bool = True
    has_states: bool = False
    max_num_drafts: int = 2**31
    num_stages: int = 1
    adapters: Collection[bytes] = ()

    def check_size(self, num_tokens: int) -> None:
        """Raise `ContextLengthExceeded` when `num_tokens` leave no room for output, `InvalidRequest` when it is 0."""
        if num_tokens < 1:
            raise InvalidRequest("a request needs at least one token", "prompt")
        if num_tokens >= self.max_request_tokens:
            raise ContextLengthExceeded(
                f"{num_tokens} tokens leave no room for output: "
                f"at most {self.max_request_tokens} tokens of prompt and output fit this node"
            )

    def check_adapter(self, prompt: Prompt) -> None:
        """Raise `ModelNotFound` when the adapter of `prompt` is not here."""
        if prompt.adapter and prompt.adapter not in self.adapters:
            raise ModelNotFound(f"the adapter {prompt.adapter.hex()} is not loaded here", "model")

    def check(self, request: Request) -> None:
        """Raise as `check_size` and `check_adapter`, and `InvalidRequest` for token ids outside the vocabulary and too
        many choices."""
        self.check_size(len(request.token_ids))
        self.check_adapter(request.prompt)
        if len(request.forks) >= self.max_num_seqs:
            raise InvalidRequest(f"{1 + len(request.forks)} choices, a step has {self.max_num_seqs} at most", "n")
        if max(request.token_ids) >= self.vocab_size:
            raise InvalidRequest(f"token id {max(request.token_ids)} is outside the vocabulary", "prompt")
        request.params.check_vocabulary(self.vocab_size)


def require_room_for_media(live: Iterable[Request]) -> None:
    """Raise `Overloaded` where the media of the requests that are there take all that media may."""
    if sum(num_payload_bytes(request.prompt.media) for request in live) > MAX_PAYLOAD_BYTES_HELD:
        raise Overloaded("the media of other requests leave no room for more")
