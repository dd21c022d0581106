"""The messages that give a node a leg of a request, take it back, or move it to another node.

Owns their fields. What comes of a leg is `baton.wire.messages.output`. Prompts are token ids: text lives at the router
only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from baton.wire.codec import U64, Id128, Length, TokenIds
from baton.wire.messages.fields import Attempt, Count, Name
from baton.wire.messages.prefixes import AwaitedPrefix
from baton.wire.prompt import Prompt
from baton.wire.sampling import DecodingParams

_Forks = Annotated[tuple[Id128, ...], Length(1024)]


@dataclass(frozen=True, slots=True)
class Prefill:
    """Router -> prefill node: the prefill leg.

    `output_ids`: what was emitted in earlier attempts, which is computed behind the prompt. The next token's output
    index is their number. `decode_node_id` and `decode_epoch` name the only node whose Grant is accepted.

    `forks` are the handoff ids of further choices of the same prompt, which share this leg and the handoff. The i-th
    one, counted from 1, samples with the number of a choice that is i above the one in `params`. The media of the
    prompt have their payload. `awaited`: the prefix that is pulled for it.
    """

    handoff_id: Id128
    attempt: Attempt
    prompt: Prompt
    params: DecodingParams
    decode_node_id: Name
    decode_epoch: U64
    output_ids: TokenIds = ()
    forks: _Forks = ()
    awaited: AwaitedPrefix | None = None

    @property
    def num_tokens(self) -> int:
        """All that are computed before the first is sampled."""
        return self.prompt.num_tokens + len(self.output_ids)


@dataclass(frozen=True, slots=True)
class PrefillPeer:
    """The node from which the KV of one request comes, and the address at which the decode node reaches it. That node
    is a prefill node, or the decode node that has generated so far."""

    node_id: Name
    epoch: U64
    address: Name


@dataclass(frozen=True, slots=True)
class Decode:
    """Router -> decode node: the decode leg; the prompt too when `prefill_peer` is None, and only then media have
    payload. Fields as in `Prefill`."""

    handoff_id: Id128
    attempt: Attempt
    prompt: Prompt
    params: DecodingParams
    prefill_peer: PrefillPeer | None
    output_ids: TokenIds = ()
    forks: _Forks = ()
    awaited: AwaitedPrefix | None = None

    @property
    def num_tokens(self) -> int:
        """The number of tokens, as in `Prefill`."""
        return self.prompt.num_tokens + len(self.output_ids)


@dataclass(frozen=True, slots=True)
class Cancel:
    """Router -> node: stop working on this attempt and release its blocks. Harmless when unknown. Other choices that
    share its leg go on."""

    handoff_id: Id128
    attempt: Attempt


@dataclass(frozen=True, slots=True)
class HandOver:
    """Router -> decode node that generates `attempt` of a request: end it, and hand its KV to that decode node under
    the name of `next_attempt`. With `goes_on` the attempt does not end, and its full blocks are handed over, as a copy.
    The answer is `HandedOver`."""

    handoff_id: Id128
    attempt: Attempt
    next_attempt: Attempt
    decode_node_id: Name
    decode_epoch: U64
    goes_on: bool = False


@dataclass(frozen=True, slots=True)
class HandedOver:
    """Node -> router, the answer to `HandOver`, behind the last token of the attempt that ended. `attempt` is the next
    one. The handoff of that has the KV of `num_tokens` of prompt and output: all but the last that was sent. 0: there
    is nothing to hand over now, and the request goes on here. It answers `Lend` too: 0 then means that nothing of it is
    cached."""

    epoch: U64
    handoff_id: Id128
    attempt: Attempt
    num_tokens: Count
