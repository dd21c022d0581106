"""The forward pass of one step, operation by operation.

Owns the order in which inputs are staged. `baton.engine.runner.graphs` does the same with a recorded graph; both first
stage, then, once the caller has uploaded, compute.

Letters: T tokens of the step, E hidden size, N rows that are due (a token is sampled for them), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch import Tensor

from baton.device.base import Staging
from baton.engine.attention.base import Attention, AttentionBackend, LayerStored, PlannedShare
from baton.engine.models.base import RunnableDecoder
from baton.engine.models.decoder import Decoder
from baton.engine.runner.inputs import StepInputs, fill_pending
from baton.engine.runner.readings import StepReadings


@dataclass(frozen=True, slots=True)
class DueRows:
    """The N tokens after which one is sampled. index: [N] int64 among the T tokens; None: the first N, in order."""

    count: int
    index: Tensor | None


class Stream(Protocol):
    """The residual stream of a step behind all layers; valid until the next step is computed."""

    def rows(self) -> Tensor:
        """[T, E], as `RunnableDecoder.forward` returns it."""
        ...

    def tapped(self) -> Sequence[Tensor]:
        """The stream [T, E] as it was in front of some layers: at each of the decoder's taps."""
        ...

    def logits(self, due: DueRows) -> Tensor:
        """[N, V] float32, or of a dtype that the sampler takes, which the caller may change."""
        ...


ForwardPass: TypeAlias = Callable[[Tensor, Tensor], Stream]
"""The residual stream of token ids and positions, [T] each, for the step that was planned last."""


@dataclass(frozen=True, slots=True)
class DecodedStream:
    """The hidden states that a decoder has computed. hidden: [T, E]."""

    decoder: RunnableDecoder
    hidden: Tensor

    def rows(self) -> Tensor:
        """The hidden states [T, E] of all tokens."""
        return self.hidden

    def tapped(self) -> Sequence[Tensor]:
        """What the taps of the decoder have kept in its pass."""
        return self.decoder.tapped() if isinstance(self.decoder, Decoder) else ()

    def logits(self, due: DueRows) -> Tensor:
        """The logits [N, V] of these tokens."""
        return self.decoder.logits(self.hidden if due.index is None else self.hidden.index_select(0, due.index))


def decoded_pass(decoder: RunnableDecoder, attention: Attention) -> ForwardPass:
    """The pass of `decoder` itself, operation by operation."""
    return lambda token_ids, positions: DecodedStream(decoder, decoder.forward(token_ids, positions, attention))


def special_pass(decoder: RunnableDecoder, attention: Attention, inputs: StepInputs) -> ForwardPass:
    """The pass of `decoder` itself over a step with tokens of media or of adapters, which only Baton's own has."""
    assert isinstance(decoder, Decoder)
    return lambda token_ids, positions: DecodedStream(
        decoder, decoder.forward(token_ids, positions, attention, inputs.media, inputs.adapted)
    )


class Forward(Protocol):
    """One step, staged and ready."""

    @property
    def stream(self) -> Stream | None:
        """Once it is computed: what it has left of each token. None of a recorded graph."""
        ...

    def compute(self, due: DueRows) -> Tensor | None:
        """Issue the step, after the upload. See `Stream.logits`; None when N is 0."""
        ...


@dataclass(slots=True)
class EagerForward:
    """A pass of which each operation is launched by itself. token_ids, positions: [T] int64; sources as well, None when
    no token is pending. `readings`: what the step reads of prompts."""

    decoder: RunnableDecoder
    run: ForwardPass
    token_ids: Tensor
    positions: Tensor
    sources: Tensor | None
    sampled: Tensor
    readings: StepReadings | None
    stream: Stream | None = None

    def compute(self, due: DueRows) -> Tensor | None:
        """Launch the pass, and what is read of its rows."""
        token_ids = self.token_ids
        if self.sources is not None:
            token_ids = fill_pending(token_ids, self.sources, self.sampled)
        stream = self.stream = self.run(token_ids, self.positions)
        if self.readings is not None:
            self.readings.compute(self.decoder, stream.rows())
        return stream.logits(due) if due.count else None


@dataclass(frozen=True, slots=True)
class EagerSteps:
    """Plans and stages any step, which `run` computes. `sampled`: see `EagerForward`."""

    decoder: RunnableDecoder
    run: ForwardPass
    attention: AttentionBackend
    staging: Staging
    sampled: Tensor

    def stage(
        self,
        inputs: StepInputs,
        shares: Sequence[PlannedShare],
        layer_stored: LayerStored | None,
        readings: StepReadings | None,
    ) -> EagerForward:
        """Stage a step over `shares`."""
        self.attention.plan(shares, self.staging, layer_stored)
        token_ids, positions = self.staging.put(inputs.token_ids), self.staging.put(inputs.positions)
        sources = self.staging.put(inputs.sources) if inputs.has_pending else None
        run = self.run if inputs.is_plain else special_pass(self.decoder, self.attention, inputs)
        return EagerForward(self.decoder, run, token_ids, positions, sources, self.sampled, readings)
