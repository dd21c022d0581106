"""A decoder's forward pass on a CPU as two recordings of kernel calls: from token ids through all layers, and from
there to logits. A later stage begins with the residual stream in the place of token ids.

Behind its attention the last layer matters only for rows that need logits. So the first recording ends there, and the
second one computes the rest of that layer for these rows. For all rows a third one does, when somebody reads them.

Owns what the recordings read and hand on: the residual stream, and tables of the rotation of each position. What
`graphs.py` is for decode steps on a GPU, this is for all steps on a CPU; a host step has no padding, since a recording
takes any number of tokens.

A recording must compute what the decoder computes, bit for bit: that is compared once, when it is made.

Letters: T tokens of the step, N rows that need logits, E hidden size, D head size, P positions.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from baton.device.host import HostStaging
from baton.engine.attention.base import SequenceShare
from baton.engine.attention.native_backend import NativeAttention
from baton.engine.models.decoder import Decoder
from baton.engine.models.ops.native_ops import gather_of
from baton.engine.models.taps import KeptStreams
from baton.engine.native.arguments import DUE, POSITIONS, TOKEN_IDS, BatonStep
from baton.engine.native.library import Kernels
from baton.engine.native.recording import Recording
from baton.engine.runner.forward import DecodedStream, DueRows

_NUM_NOTED = 2
"""Tokens of the pass that is noted: with one, torch may give rows any distance."""
_NUM_COMPARED = 3
_NEXT_POSITIONS = 256
"""How many rotations are computed at once: a few milliseconds."""
_NOTHING_OF_A_STEP = BatonStep()
"""For calls that know a step by the number of its rows alone."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Of the largest step: its tokens, the rows that need logits, and one more than its highest position."""

    max_tokens: int
    max_rows: int
    max_positions: int


class RecordedLayers:
    """The forward pass of `decoder` over the KV of `attention`. See `ForwardPass`. `rest`: of the last layer, for all
    rows, where the recording ends before it."""

    def __init__(self, decoder: Decoder, attention: NativeAttention, kernels: Kernels, sizes: StepSizes) -> None:
        """Computes a small pass in block 0, which must not be in use."""
        self.head: RecordedHead | None = None
        self.kernels = kernels
        self.decoder = decoder
        self._attention = attention
        self._embedded = decoder.lookup_table
        self.residual = torch.empty(sizes.max_tokens, decoder.config.hidden_size, dtype=decoder.dtype)
        self._rotations = RotationTables(decoder, sizes)
        token_ids, positions = decoder.trial_inputs(_NUM_NOTED), torch.arange(_NUM_NOTED)
        attention.plan([SequenceShare(0, _NUM_NOTED, (0, 0))], HostStaging())
        self._rotations.extend(attention.num_positions)
        residual = self.residual[:_NUM_NOTED].copy_(decoder.embed(token_ids, positions))
        kept, self._taps = decoder.taps, None
        if isinstance(kept, KeptStreams):
            decoder.taps = self._taps = RecordedTaps(kept.layers, attention, kernels, self.residual)
        with kernels.noting() as notes:
            if self._embedded is not None:
                kernels.gather(gather_of(self.residual, self._embedded, TOKEN_IDS, token_ids))
            rotations = self._rotations.gather(kernels, positions)
            # all rows are read by a later stage and by taps; ranks add up their shares of the last layer
            is_cut = decoder.has_head and not decoder.is_divided and self._taps is None
            output = (decoder.attend if is_cut else decoder.run_layers)(residual, rotations, attention)
        decoder.taps = kept
        self.recording = Recording(kernels, notes, output, sizes.max_tokens)
        self.rest = self._record_rest(residual, sizes.max_tokens) if is_cut else None
        delta = self.recording.output if self.rest is None else self.rest.output
        self._rows, self._delta = FirstRows(self.residual), FirstRows(delta)

    def _record_rest(self, residual: Tensor, max_tokens: int) -> Recording:
        with self.kernels.noting() as notes:
            delta = self.decoder.finish(residual, self.recording.output[:_NUM_NOTED])
        return Recording(self.kernels, notes, delta, max_tokens)

    def __call__(self, token_ids: Tensor, positions: Tensor) -> RecordedStream:
        """Replay the layers over these tokens."""
        num_tokens = token_ids.shape[0]
        if num_tokens > self._rows.capacity:
            raise RuntimeError(f"a step of {num_tokens} tokens; there is room for {self._rows.capacity}")
        residual = self._rows.of(num_tokens)
        if self._embedded is None:
            residual.copy_(self.decoder.embed(token_ids, positions))
        self._rotations.extend(self._attention.num_positions)
        self._attention.replay(self.recording, token_ids, positions)
        return RecordedStream(self, residual, self._delta.of(num_tokens), self._taps)

    def finish(self, num_tokens: int) -> None:
        """Compute the rest of the last layer for all rows of the last step, which has so many."""
        if self.rest is not None:
            self.rest.replay(_NOTHING_OF_A_STEP, num_tokens)

    @property
    def needs_torch(self) -> bool:
        """Whether torch computes a part of a step."""
        return self._embedded is None or self.head is None

    def repeat(self) -> None:
        """Compute a step with inputs where those of the last step were, of which all tokens were due; its logits come
        where theirs are. Nothing of it `needs_torch`."""
        self._rotations.extend(self._attention.num_positions)
        self._attention.repeat(self.recording)
        if self.head is not None:
            self.head.repeat()


class RecordedTaps:
    """Taps in front of `layers`: the calls that copy the stream there, and what is still to be added to it, are noted
    with the others. See `Taps`."""

    def __init__(self, layers: Sequence[int], attention: NativeAttention, kernels: Kernels, residual: Tensor) -> None:
        """`residual`: the whole of what passes are computed in."""
        self._layers = layers
        self._kernels = kernels
        self._all = torch.arange(len(residual))
        self._like = residual
        self._kept: dict[int, list[Tensor]] = {}
        attention.take_due(self._all)

    def pass_by(self, number: int, residual: Tensor, delta: Tensor | None) -> None:
        """Copy both, where there is a tap."""
        if number not in self._layers:
            return
        self._kept[number] = [torch.empty_like(self._like) for table in (residual, delta) if table is not None]
        for out, table in zip(self._kept[number], (residual, delta), strict=False):
            assert table is not None  # the last one, if any
            copied = gather_of(out, table, DUE, self._all[: len(table)])
            copied.num_table_rows = len(self._all)  # of a replay
            self._kernels.gather(copied)

    def streams(self, num_tokens: int) -> list[Tensor]:
        """The streams of the last replay, which had `num_tokens`: for each of the layers [T, E]."""
        first = {number: [each[:num_tokens] for each in kept] for number, kept in self._kept.items()}
        sums = {number: rows[0] + rows[1] if len(rows) > 1 else rows[0].clone() for number, rows in first.items()}
        return [sums[layer] for layer in self._layers]


class FirstRows:
    """The first rows of a tensor, as many as a step has. Most steps have as many as the one before them."""

    def __init__(self, whole: Tensor) -> None:
        self._whole = self._rows = whole
        self._count = whole.shape[0]
        self.capacity = whole.shape[0]

    def of(self, count: int) -> Tensor:
        """The first `count` rows, of at most `capacity`."""
        if self._count != count:
            self._rows, self._count = self._whole[:count], count
        return self._rows


class RotationTables:
    """The rotations of all positions up to the highest one seen, computed when one is seen for the first time: for each
    kind cos and sine [P, D], and their rows of a step [T, 1, D].

    A position takes as much memory as a key and a value of one head in one layer.
    """

    def __init__(self, decoder: Decoder, sizes: StepSizes) -> None:
        self._decoder = decoder
        self._num_positions = 0
        like = [table for kind in decoder.rotations(torch.zeros(1, dtype=torch.int64)) for table in kind]
        # the system gives memory for what is written
        self._tables = [torch.empty(sizes.max_positions, table.shape[-1], dtype=table.dtype) for table in like]
        self._rows = [torch.empty(sizes.max_tokens, 1, table.shape[-1], dtype=table.dtype) for table in like]

    def extend(self, num_positions: int) -> None:
        """Compute what is missing for positions below `num_positions`."""
        first = self._num_positions
        if num_positions <= first:
            return
        if num_positions > len(self._tables[0]):
            raise RuntimeError(f"a step of {num_positions} positions; there is room for {len(self._tables[0])}")
        with torch.inference_mode():
            self._compute(num_positions)

    def _compute(self, num_positions: int) -> None:
        first = self._num_positions
        last = max(num_positions, min(first + _NEXT_POSITIONS, len(self._tables[0])))
        kinds = self._decoder.rotations(torch.arange(first, last))
        for table, values in zip(self._tables, (values for kind in kinds for values in kind), strict=True):
            table[first:last] = values[:, 0]
        self._num_positions = last

    def gather(self, kernels: Kernels, positions: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
        """The rotations of `positions` [T]."""
        for rows, table in zip(self._rows, self._tables, strict=True):
            kernels.gather(gather_of(rows, table, POSITIONS, positions))
        found = [rows[: len(positions)] for rows in self._rows]
        return tuple(zip(found[::2], found[1::2], strict=True))


class RecordedHead:
    """From where the recording of `layers` ends to the logits of rows that are due."""

    def __init__(self, layers: RecordedLayers, max_rows: int) -> None:
        """Raises `LookupError` where logits do not come from a call of the kernels."""
        kernels, decoder = layers.kernels, layers.decoder
        self._first = torch.arange(max_rows)
        self._step = BatonStep()
        rows = self._first[:_NUM_NOTED]
        with kernels.noting() as notes:
            gathered = []
            for table in (layers.residual, layers.recording.output.flatten(1)):
                gathered.append(kernels.empty((_NUM_NOTED, table.shape[-1]), table.dtype))
                kernels.gather(gather_of(gathered[-1], table, DUE, rows))
            residual, found = gathered
            logits = decoder.head(residual, found if layers.rest is None else decoder.finish(residual, found))
        self._recording = Recording(kernels, notes, logits, max_rows)
        self._logits = FirstRows(self._recording.output)
        self._count = 0

    def logits(self, due: DueRows) -> Tensor:
        """[N, V] in the model's dtype, of the step that `layers` has computed last."""
        self._step.due = (self._first if due.index is None else due.index).data_ptr()
        self._count = due.count
        self.repeat()
        return self._logits.of(due.count)

    def repeat(self) -> None:
        """As `logits`, for as many rows in the same places, which come where they are."""
        self._recording.replay(self._step, self._count)


@dataclass(slots=True)
class RecordedStream:
    """The hidden states that `layers` have computed. residual: [T, E]; delta: what the last layer adds to it, until it
    `is_complete`. `taps`: what kept it between layers."""

    layers: RecordedLayers
    residual: Tensor
    delta: Tensor
    taps: RecordedTaps | None = None
    is_complete: bool = False

    def rows(self) -> Tensor:
        """The hidden states [T, E] of all tokens."""
        if not self.is_complete:
            self.layers.finish(len(self.residual))
            self.residual.add_(self.delta)
            self.is_complete = True
        return self.residual

    def tapped(self) -> Sequence[Tensor]:
        """The streams [T, E] at the taps."""
        return () if self.taps is None else self.taps.streams(len(self.residual))

    def logits(self, due: DueRows) -> Tensor:
        """The logits [N, V] of these tokens: by the recorded head, if there is one, until the stream is complete."""
        head = self.layers.head
        if head is not None and not self.is_complete:
            return head.logits(due)
        return DecodedStream(self.layers.decoder, self.rows()).logits(due)


@torch.inference_mode()
def record_layers(
    decoder: Decoder, attention: NativeAttention, kernels: Kernels, sizes: StepSizes
) -> RecordedLayers | None:
    """A recording that computes what `decoder` computes; None, with a log line, where there is none: some operation is
    not a call of `kernels`. Uses block 0, before any request does."""
    if not decoder.is_recordable:
        _log.info("the forward pass of %s is computed operation by operation", decoder.config.architecture)
        return None
    sizes = StepSizes(*(max(size, _NUM_COMPARED) for size in astuple(sizes)))
    try:
        recorded = RecordedLayers(decoder, attention, kernels, sizes)
    except LookupError as error:
        _log.warning("the forward pass is not recorded, and steps take longer: %s", error)
        return None
    token_ids, positions = decoder.trial_inputs(_NUM_COMPARED), torch.arange(_NUM_COMPARED)
    attention.plan([SequenceShare(0, _NUM_COMPARED, (0,) * _NUM_COMPARED)], HostStaging())
    expected = decoder.forward(token_ids, positions, attention)
    if not _are_equal(expected, recorded(token_ids, positions).rows()):
        _log.warning("the forward pass is not recorded, and steps take longer: not all of it is calls of the kernels")
        return None
    if decoder.has_head and not decoder.is_divided:
        _record_head(recorded, sizes.max_rows, expected)
    return recorded


def _record_head(recorded: RecordedLayers, max_rows: int, hidden: Tensor) -> None:
    """Give `recorded` a recording of the head, where that computes what the decoder computes. hidden: [T, E] behind all
    layers of the first tokens there are."""
    decoder = recorded.decoder
    token_ids, positions = decoder.trial_inputs(len(hidden)), torch.arange(len(hidden))
    try:
        recorded.head = RecordedHead(recorded, max_rows)
    except LookupError as error:
        _log.info("the head is computed operation by operation: %s", error)
        return
    logits = recorded(token_ids, positions).logits(DueRows(len(hidden), None))
    if not _are_equal(decoder.head(hidden, None), logits):
        recorded.head = None


def _are_equal(a: Tensor, b: Tensor) -> bool:
    """Bit for bit."""
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
