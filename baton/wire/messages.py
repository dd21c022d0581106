"""Messages between the router and the nodes. `docs/protocol.md` says when each is sent and what answers it.

One connection per node and router: the node dials each router's control address and stays connected. A request is named
by its `handoff_id` (128 bits, chosen by the router, see `baton.wire.request_key`) and `attempt`; whatever carries an
older attempt is dropped. Prompts are token ids: text lives at the router only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from baton.wire.codec import U32, U64, Bounds, Codec, Id128, Length, Packed, TokenIds
from baton.wire.layout import KvLayout
from baton.wire.prompt import Prompt
from baton.wire.pulls import AwaitedPrefix, Lend, Pull, Pulled
from baton.wire.sampling import MAX_TOP_LOGPROBS, DecodingParams
from baton.wire.step_cost import StepCost
from baton.wire.tiers import TierUsages, TokensByTier

PREFILL, DECODE, BOTH = "prefill", "decode", "both"

_Name = Annotated[str, Length(128)]
_Names = Annotated[tuple[_Name, ...], Length(16)]
_Text = Annotated[str, Length(1024)]
_Count = Annotated[int, Bounds(0, 2**40)]
_Attempt = Annotated[int, Bounds(1, 10**6)]
_Forks = Annotated[tuple[Id128, ...], Length(1024)]
_TopIds = Annotated[tuple[int, ...], Packed("I", MAX_TOP_LOGPROBS)]
_TopValues = Annotated[tuple[float, ...], Packed("d", MAX_TOP_LOGPROBS)]

MAX_READ_BYTES = 2**16
"""Of values that were read of a prompt, in one message."""
LIVE_KEY_BYTES = 20
FINISH_STOP, FINISH_LENGTH, FINISH_COMPLETE = "stop", "length", "complete"
"""Why a node ended an output: its last token is one that ends outputs, and no part of the text; it has all the tokens
it may have; its grammar allows no further token. A client is told "stop" in the last case too."""


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """A node's load, as of its last step. `num_preemptions` counts from its start. `cost`: of its steps, as far as it
    knows. `num_leased_blocks` of those that are held belong to handoffs, and maybe to requests as well. `tiers`: of its
    KV store."""

    num_running: _Count
    num_waiting: _Count
    num_free_blocks: _Count
    num_cached_blocks: _Count
    num_held_blocks: _Count
    loop_age_s: Annotated[float, Bounds(0, 1e9)]
    num_preemptions: _Count = 0
    cost: StepCost | None = None
    num_leased_blocks: _Count = 0
    tiers: TierUsages = ()


@dataclass(frozen=True, slots=True)
class Hello:
    """Node -> router, first message of a connection.

    `epoch` is random for each life of the process. `fingerprint` names the weights and architecture. `peer_address` is
    where other nodes reach this one. `max_request_tokens` is the longest prompt plus output that the node's context and
    pool can hold. `clock` names the clock of its stamps (see `baton.runtime.clock`), "" when it has no name. `session`
    is the one that it is in, 0 for none. `tokenizer` is the digest of its tokenizer, "" when its checkpoint has none:
    masks of grammars depend on it.

    `prefers` is "" for a node that does the legs of its role. A decode node that does any leg has `PREFILL`, `DECODE`
    or `BOTH`: the legs that it is given where there is a choice. `group`: with which other nodes it is counted and
    drained, "" for none. `media`: the kinds of media that it computes. `start_ms`: what its start took but for
    imports, 0 where that is not known. `can_pull`: it takes the KV of prefixes from other nodes, see `Pull`.
    """

    role: _Name
    node_id: _Name
    epoch: U64
    fingerprint: _Name
    layout: KvLayout
    peer_address: _Name
    http_address: _Name
    num_blocks: _Count
    max_request_tokens: _Count
    max_num_seqs: _Count
    status: NodeStatus
    clock: _Name
    session: U64 = 0
    tokenizer: _Name = ""
    prefers: _Name = ""
    group: _Name = ""
    media: _Names = ()
    start_ms: U32 = 0
    can_pull: bool = False


@dataclass(frozen=True, slots=True)
class Welcome:
    """Router -> node: registered. Another `session` than before means every earlier request of this router is void.
    `epoch` is the router's, random for each life of it: its requests begin with it."""

    session: U64
    epoch: U64 = 0


@dataclass(frozen=True, slots=True)
class Refusal:
    """Router -> node: not registered, and why. A node that has never been registered ends with this message."""

    message: _Text


@dataclass(frozen=True, slots=True)
class Ping:
    """Router -> node, twice a second. A node that hears none for its router time-out drops the router's requests.

    `sent` and `received`: the last numbers that the router has given to a message, and has had from the node.
    """

    session: U64
    sent: U64
    received: U64


@dataclass(frozen=True, slots=True)
class Pong:
    """Node -> router, the answer to a Ping. `sent` and `received` are the node's. `live` are the attempts that it knows
    of this router, as of then, laid end to end: 20 bytes each, the handoff id and the attempt as u32. `num_other_legs`:
    those of other routers. `num_other_prompt_tokens`: of their prompts, what is not computed yet."""

    session: U64
    sent: U64
    received: U64
    live: Annotated[bytes, Length(2**20)]
    num_other_legs: _Count = 0
    num_other_prompt_tokens: _Count = 0

    @property
    def live_keys(self) -> frozenset[bytes]:
        """The attempts that are alive, each as `live_key` has it."""
        return frozenset(self.live[at : at + LIVE_KEY_BYTES] for at in range(0, len(self.live), LIVE_KEY_BYTES))


@dataclass(frozen=True, slots=True)
class Resume:
    """Both ways: messages were lost, so send again from number `first` on."""

    session: U64
    first: U64


@dataclass(frozen=True, slots=True)
class Introduce:
    """Router -> node it does not know (the router restarted): say Hello again."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Node -> router, every second, from a thread of its own."""

    epoch: U64
    status: NodeStatus


@dataclass(frozen=True, slots=True)
class Leaving:
    """Node -> router: route nothing more here; what is in flight will be finished."""

    epoch: U64


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
    attempt: _Attempt
    prompt: Prompt
    params: DecodingParams
    decode_node_id: _Name
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

    node_id: _Name
    epoch: U64
    address: _Name


@dataclass(frozen=True, slots=True)
class Decode:
    """Router -> decode node: the decode leg; the prompt too when `prefill_peer` is None, and only then media have
    payload. Fields as in `Prefill`."""

    handoff_id: Id128
    attempt: _Attempt
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
    attempt: _Attempt


@dataclass(frozen=True, slots=True)
class HandOver:
    """Router -> decode node that generates `attempt` of a request: end it, and hand its KV to that decode node under
    the name of `next_attempt`. With `goes_on` the attempt does not end, and its full blocks are handed over, as a copy.
    The answer is `HandedOver`."""

    handoff_id: Id128
    attempt: _Attempt
    next_attempt: _Attempt
    decode_node_id: _Name
    decode_epoch: U64
    goes_on: bool = False


@dataclass(frozen=True, slots=True)
class Drain:
    """Router -> node: finish, and end. `starts_again`: whoever watches over the process should start it again."""

    starts_again: bool


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of probabilities before temperature: the chosen token's, and the most likely ones'."""

    logprob: float
    top_ids: _TopIds
    top_logprobs: _TopValues


@dataclass(frozen=True, slots=True)
class HandoffFigures:
    """The measurements of one handoff: how much it moved and how long it took, by monotonic clocks.

    `transfer_us`: from the grant to the verified blocks, the computing of the prompt included. `exposed_us`: the part
    of it that came after the prompt was computed.
    """

    num_blocks: _Count
    num_bytes: _Count
    transfer_us: _Count
    exposed_us: _Count


@dataclass(frozen=True, slots=True)
class StepTimes:
    """When a token was computed, in microseconds of the node's clock.

    `ready_us`: the KV of a handoff had arrived and was verified; None where the node did not wait for a handoff.
    `begun_us`: the first step that computed anything towards this token was about to run. `sampled_us`: its last step
    was over.
    """

    ready_us: U64 | None
    begun_us: U64
    sampled_us: U64


@dataclass(slots=True)
class TokenEvent:
    """Tokens of one request.

    `index` is the output index of token_ids[0]; logprobs is empty or one per token. `finish_reason` is "" while the
    request goes on. `num_cached_tokens` counts prompt tokens that the reporting node had cached, and did not compute
    for this request. `handoff` comes once, with the token that D repeats. `times` is of token_ids[0], and comes with
    the first two tokens of an attempt at most. `tiers`: how many of the cached tokens came from a KV store, told with
    output 0; None where none did.

    An event must not be changed. The class is not frozen because there is one event for each token, at both ends of the
    link. A frozen one takes three times as long to construct.
    """

    handoff_id: Id128
    attempt: _Attempt
    index: _Count
    token_ids: TokenIds
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: Annotated[str, Length(16)]
    num_cached_tokens: _Count
    handoff: HandoffFigures | None = None
    times: StepTimes | None = None
    tiers: TokensByTier | None = None


@dataclass(frozen=True, slots=True)
class Tokens:
    """Node -> router, one per step for all requests of the step."""

    epoch: U64
    events: tuple[TokenEvent, ...]


@dataclass(frozen=True, slots=True)
class PromptRead:
    """Node -> router, before the first token: what was read of some rows of a prompt, in order.

    `first_row` is the place of the first of them in the prompt. `values`: in the format of what the request asks for;
    with `prompt_logprobs` that of `baton.wire.prompt_logprobs`.
    """

    epoch: U64
    handoff_id: Id128
    attempt: _Attempt
    first_row: Annotated[int, Bounds(0, 2**40)]
    num_rows: Annotated[int, Bounds(1, 2**30)]
    values: Annotated[bytes, Length(MAX_READ_BYTES)]


@dataclass(frozen=True, slots=True)
class Failed:
    """Node -> router: this attempt ended without finishing. `code` is a code of `baton.wire.errors`."""

    handoff_id: Id128
    attempt: _Attempt
    code: _Name
    message: _Text


@dataclass(frozen=True, slots=True)
class HandedOver:
    """Node -> router, the answer to `HandOver`, behind the last token of the attempt that ended. `attempt` is the next
    one. The handoff of that has the KV of `num_tokens` of prompt and output: all but the last that was sent. 0: there
    is nothing to hand over now, and the request goes on here. It answers `Lend` too: 0 then means that nothing of it is
    cached."""

    epoch: U64
    handoff_id: Id128
    attempt: _Attempt
    num_tokens: _Count


@dataclass(frozen=True, slots=True)
class CacheEvents:
    """Node -> router: changes of the node's prefix cache, as 16-byte block hashes laid end to end.

    `is_snapshot` means forget what was known of this node. Losing one of these costs routing quality, nothing else.
    """

    epoch: U64
    is_snapshot: bool
    stored: Annotated[bytes, Length(2**20)]
    removed: Annotated[bytes, Length(2**20)]


def live_key(handoff_id: bytes, attempt: int) -> bytes:
    """The bytes by which `Pong` names an attempt: its handoff id, and its number as u32."""
    return handoff_id + attempt.to_bytes(4, "little")


def control_identity(epoch: int) -> bytes:
    """ZMQ identity of a node's control connection: a router can address every node whose epoch it has heard of."""
    return b"N" + epoch.to_bytes(8, "little")


def epoch_of_identity(identity: bytes) -> int | None:
    """The epoch in a control identity; None for any other connection."""
    is_control = len(identity) == 9 and identity[:1] == b"N"
    return int.from_bytes(identity[1:], "little") if is_control else None


ROUTER_TO_NODE = Codec(Welcome, Refusal, Ping, Introduce, Resume, Prefill, Decode, Cancel, HandOver, Lend, Pull, Drain)
NODE_TO_ROUTER = Codec(
    Hello, Heartbeat, Pong, Resume, Leaving, Tokens, PromptRead, Failed, HandedOver, Pulled, CacheEvents
)
