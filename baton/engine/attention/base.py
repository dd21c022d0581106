"""The one interface between the decoder and attention: a step is planned once, and run once for each layer.

Owns: what the runner tells a backend about a step, and what a decoder may call. How keys and values are stored and
which kernels read them is the backend's knowledge; it was constructed with the KV tensor and the model's shape.

Letters: T tokens of the step, all sequences flattened; Hq query heads; Hkv key and value heads; D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from torch import Tensor

from baton.device.base import Staging

LayerStored: TypeAlias = Callable[[], None]
"""Called once for each layer of the model, when the KV of that layer will not change any more in the blocks of the
step; on any thread. The last calls may come shortly after the step's result."""

_STAGED_VALUE_BYTES = 8
_STAGING_GAP_BYTES = 64


class PlannedShare(Protocol):
    """One sequence's part of a step: its tokens start .. start + num_tokens - 1, KV in the slots of `block_table`.

    In the flattened batch, sequences lie one after another in the order of the plan. The shares of the scheduler have
    this, and `SequenceShare` has nothing else.
    """

    @property
    def start(self) -> int:
        """The position of the first token in its sequence."""
        ...

    @property
    def num_tokens(self) -> int:
        """How many tokens the step computes of the sequence."""
        ...

    @property
    def block_table(self) -> Sequence[int]:
        """The blocks of the sequence, in order. They have room for `context_len` tokens."""
        ...

    @property
    def context_len(self) -> int:
        """Tokens the last token of the share attends to, itself included."""
        ...

    @property
    def num_drafts(self) -> int:
        """How many of the last tokens are guesses. Only backends with states need to know: a state has to go back
        behind a wrong one."""
        ...


class SequenceShare(NamedTuple):
    """A sequence's part of a step, as a plain value: the least that a backend has to know."""

    start: int
    num_tokens: int
    block_table: Sequence[int]
    num_drafts: int = 0

    @property
    def context_len(self) -> int:
        """The tokens of the sequence that attention sees: those stored before, and those of this step."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True, eq=False)
class LayerRule:
    """How a layer attends, beyond what its KV says. `scale`: of q k^T; None: 1/sqrt(D). `cap`: c makes a score x to
    c * tanh(x / c). `sinks` [Hq]: for each query head one more score, whose weight goes nowhere."""

    scale: float | None = None
    cap: float | None = None
    sinks: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether scores are weighed by a softmax alone, which is what every kernel computes."""
        return self.cap is None and self.sinks is None

    def scale_of(self, head_dim: int) -> float:
        """The scale of layers with heads of that size."""
        return 1.0 / math.sqrt(head_dim) if self.scale is None else self.scale


PLAIN = LayerRule()


class Attention(Protocol):
    """Attention as a decoder sees it in a step."""

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v of the step's tokens in layer `layer` of this stage. Then attend causally, by the layer's
        `LayerRule`.

        q: [T, Hq, D], k and v: [T, Hkv, D], rotated already. All three may be views: the last dimension is contiguous,
        heads are D apart, and the distance between tokens is the tensor's own. Returns [T, Hq, D].
        """
        ...


class StatePiece(NamedTuple):
    """Neighbouring tokens of one sequence, in one block: the tokens `first` to `last - 1` of a step. Their sequence's
    state before them lies in the block `before` (None at its begin), and that behind them belongs into `block`. In the
    step there are `level` pieces of the sequence before it."""

    first: int
    last: int
    before: int | None
    block: int
    level: int


class KeepsStates(Protocol):
    """An `Attention` over a pool that has states, for the layers that keep one. The first rows of a state are the last
    inputs of a convolution; what a recurrence carries on lies behind them."""

    def recent(self, layer: int, x: Tensor, num_before: int) -> Tensor:
        """The inputs of each token and of the `num_before` tokens before it: [T, 1 + num_before, E] of x [T, E]. The
        oldest is first, and zeros stand before the begin of a sequence.

        The last inputs go into the states. E is this rank's share of an input.
        """
        ...

    def carried(self, layer: int, num_before: int, num_elements: int) -> Tensor:
        """This rank's elements of the states, [B, num_elements], that lie behind `num_before` inputs."""
        ...

    @property
    def pieces(self) -> Sequence[StatePiece]:
        """The step's tokens, cut where blocks end: those of a sequence after each other."""
        ...

    def stored(self) -> None:
        """To be called when the states of a layer are brought up to date."""
        ...

    def settle(self, num_accepted: Tensor) -> None:
        """Of each share with drafts the first `num_accepted` [shares] int64 were right: have the states behind these in
        its blocks. Issued once for a step, behind it."""
        ...


class AttentionBackend(Attention, Protocol):
    """Attention as a runner sees it: an `Attention` that can plan the next step.

    Neither call waits for the device, nor asks it for a value.
    """

    def plan(self, shares: Sequence[PlannedShare], staging: Staging, layer_stored: LayerStored | None = None) -> None:
        """Prepare for one step over `shares`; valid until the next plan. Block tables must cover every context.

        Inputs for the device are put into `staging`, which the caller uploads before the first `run`. `layer_stored` is
        called in each `run` once everything that stores keys and values of that layer was issued.
        """
        ...

    def for_graph(self, num_sequences: int) -> AttentionBackend | None:
        """A backend over the same KV whose `run` can be recorded, or None where there is none.

        It takes steps of exactly `num_sequences` shares of one token. Its plans put the same arrays into the staging in
        the same order each time. A recorded `run` therefore computes, when it is replayed, the step that was planned
        last. `layer_stored` is not for recorded steps: no Python runs in a replay.
        """
        ...


def attention_staging_bytes(max_tokens: int, max_sequences: int, max_blocks: int) -> int:
    """The staging memory that the plan of a step needs at most, for every backend.

    `max_tokens` and `max_sequences` of a step, `max_blocks` of one sequence.
    """
    num_values = 4 * max_tokens + max_sequences * (max_blocks + 7) + 1
    return _STAGED_VALUE_BYTES * num_values + _STAGING_GAP_BYTES * (max_sequences + 14)
