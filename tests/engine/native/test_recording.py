"""Recorded layers compute what the decoder computes, bit for bit, for steps of any size and in any order."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from baton.device.host import HostStaging
from baton.engine.attention.base import LayerStored, SequenceShare
from baton.engine.attention.native_backend import NativeAttention
from baton.engine.attention.paged_kv import PagedKv
from baton.engine.models.collectives import Collectives
from baton.engine.models.config import load_config
from baton.engine.models.decoder import Decoder
from baton.engine.models.loading import load_weights
from baton.engine.models.noted_collectives import NotedCollectives
from baton.engine.models.ops.native_ops import NativeOps, NativeWeight
from baton.engine.models.taps import KeptStreams, Taps
from baton.engine.models.weight_files import SINGLE_FILE
from baton.engine.native.library import Kernels
from baton.engine.native.recording import Recording
from baton.engine.runner.forward import DueRows
from baton.engine.runner.recorded_layers import StepSizes, record_layers
from baton.wire.layout import DTYPE_BYTES, KvLayout
from tests.checkpoints import make_checkpoint
from tests.engine.models.families import make_model
from tests.engine.native.compiled import LEVELS, kernels, needs_kernels

pytestmark = needs_kernels
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
MAX_TOKENS, MAX_POSITIONS = 40, 600
SIZES = StepSizes(MAX_TOKENS, MAX_TOKENS, MAX_POSITIONS)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Model:
    """A small decoder with KV of its own."""

    def __init__(
        self,
        folder: Path,
        dtype: str,
        ops: NativeOps,
        threads: Kernels,
        collectives: Collectives | None = None,
        taps: Taps | None = None,
    ) -> None:
        config = load_config(folder)
        self.vocab_size = min(300, config.vocab_size)
        self.decoder = Decoder(config, DTYPES[dtype], "cpu", ops, collectives=collectives)
        load_weights(folder, self.decoder)
        self.decoder.taps = taps
        layout = KvLayout.of_layers(dtype, 4, self.decoder.layer_kvs)
        self.blocks = torch.zeros(32, layout.block_bytes // DTYPE_BYTES[dtype], dtype=DTYPES[dtype])
        self.attention = NativeAttention(threads, PagedKv(layout, self.blocks), config.num_heads)
        self.recorded = record_layers(
            self.decoder, self.attention, threads, StepSizes(MAX_TOKENS, MAX_TOKENS, MAX_POSITIONS)
        )

    def plan(self, shares: list[SequenceShare], layer_stored: LayerStored | None = None) -> tuple[Tensor, Tensor]:
        """Token ids and positions of a step."""
        self.attention.plan(shares, HostStaging(), layer_stored)
        positions = torch.cat([torch.arange(share.start, share.context_len) for share in shares])
        return (positions * 7 + len(positions)) % self.vocab_size, positions

    @torch.inference_mode()
    def run(self, shares: list[SequenceShare], layer_stored: LayerStored | None = None) -> Tensor:
        """A step by the decoder, operation by operation."""
        return self.decoder.forward(*self.plan(shares, layer_stored), self.attention)

    @torch.inference_mode()
    def replay(self, shares: list[SequenceShare], layer_stored: LayerStored | None = None) -> Tensor:
        """A step by the recording."""
        assert self.recorded is not None
        return self.recorded(*self.plan(shares, layer_stored)).rows().clone()


def model_of(
    folder: Path,
    family: str = "qwen3",
    dtype: str = "bfloat16",
    level: str = "",
    num_threads: int = 2,
    *,
    tie: bool = False,
    taps: Taps | None = None,
) -> Model:
    threads = kernels(level or LEVELS[0], num_threads)
    return Model(make_checkpoint(folder, family, dtype=dtype, tie=tie), dtype, NativeOps(threads), threads, taps=taps)


STEPS = [
    [SequenceShare(0, 9, (3, 1, 2))],
    [SequenceShare(9, 1, (3, 1, 2)), SequenceShare(0, 30, (4, 5, 6, 7, 8, 9, 10, 11))],
    [SequenceShare(10, 1, (3, 1, 2)), SequenceShare(30, 1, (4, 5, 6, 7, 8, 9, 10, 11)), SequenceShare(0, 1, (12,))],
    [SequenceShare(11, 1, (3, 1, 2))],
    [SequenceShare(0, MAX_TOKENS, tuple(range(13, 23)))],
]
"""Prompts, decodes, both, and the largest step; blocks of 4 tokens."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_of_any_size_are_those_of_the_decoder(tmp_path: Path, family: str, dtype: str) -> None:
    assert_replays_equal(model_of(tmp_path, family, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe", "gpt-oss"])
def test_mixtures_of_experts_are_recorded_as_well(tmp_path: Path, family: str, dtype: str) -> None:
    make_model(tmp_path, family)
    threads = kernels(LEVELS[0], 2)
    assert_replays_equal(Model(tmp_path, dtype, NativeOps(threads), threads))


def assert_replays_equal(model: Model) -> None:
    for number, shares in enumerate(STEPS):
        before = model.blocks.clone()
        expected = model.run(shares)
        stored = model.blocks.clone()
        model.blocks.copy_(before)
        replayed = model.replay(shares)
        assert torch.equal(replayed, expected), number
        assert torch.equal(model.blocks, stored), number


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_taps_keep_the_stream_between_layers_that_the_decoder_has(tmp_path: Path, family: str, dtype: str) -> None:
    """In front of the first layer, between both, and behind the last; in any order, and more than once."""
    model = model_of(tmp_path, family, dtype, taps=KeptStreams((2, 0, 1, 1)))
    assert model.recorded is not None
    for shares in STEPS:
        hidden, expected = model.run(shares), model.decoder.tapped()
        assert torch.equal(expected[0], hidden)
        assert torch.equal(expected[2], expected[3])
        stream = model.recorded(*model.plan(shares))
        found = stream.tapped()
        assert len(found) == len(expected) == 4
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert torch.equal(stream.rows(), hidden)
        assert all(torch.equal(a, b) for a, b in zip(stream.tapped(), expected, strict=True))


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_any_rows_are_those_of_the_decoder(tmp_path: Path, family: str, dtype: str) -> None:
    model = model_of(tmp_path, family, dtype)
    assert model.recorded is not None
    assert model.recorded.head is not None
    for shares in STEPS:
        hidden = model.run(shares)
        num_tokens = len(hidden)
        for index in (None, torch.tensor([num_tokens - 1]), torch.arange(num_tokens - 1, -1, -1)):
            due = DueRows(num_tokens if index is None else len(index), index)
            expected = model.decoder.head(hidden if index is None else hidden[index], None)
            stream = model.recorded(*model.plan(shares))
            assert torch.equal(stream.logits(due), expected)
            assert torch.equal(stream.rows(), hidden)
            assert torch.equal(stream.rows(), hidden)  # once they are complete they stay so
            assert torch.equal(stream.logits(due).to(expected.dtype), expected)


@torch.inference_mode()
def test_behind_its_attention_the_last_layer_computes_rows_that_are_due_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(tmp_path)
    assert model.recorded is not None
    last = torch.tensor([8])
    expected = model.decoder.head(model.run(STEPS[0])[last], None)
    monkeypatch.setattr(model.recorded, "finish", lambda num_tokens: pytest.fail(f"all {num_tokens} rows"))
    assert torch.equal(model.recorded(*model.plan(STEPS[0])).logits(DueRows(1, last)), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_table_that_the_head_has_packed_is_there_once(tmp_path: Path, dtype: str) -> None:
    model = model_of(tmp_path, dtype=dtype, tie=True)
    decoder = model.decoder
    assert isinstance(decoder.lookup_table, NativeWeight)
    table = load_file(tmp_path / SINGLE_FILE)["model.embed_tokens.weight"]
    assert torch.equal(decoder.embed(torch.arange(len(table)), torch.zeros(len(table))), table)
    for shares in STEPS:
        assert torch.equal(model.replay(shares), model.run(shares))


def test_positions_that_come_late_are_rotated_as_the_decoder_rotates_them(tmp_path: Path) -> None:
    model = model_of(tmp_path, "llama")
    table = tuple(number % 32 for number in range(MAX_POSITIONS // 4))
    for start in (3, 254, 255, 20, 515, MAX_POSITIONS - 5):
        shares = [SequenceShare(start, 5, table), SequenceShare(start // 2, 1, table)]
        assert torch.equal(model.replay(shares), model.run(shares)), start


def test_a_step_for_which_there_was_no_memory_leaves_the_next_ones_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(tmp_path, "llama")
    small = [SequenceShare(0, 3, (0,))]
    expected = model.replay(small)
    arrays = weakref.ref(model.attention._arrays)

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", refuse)
        with pytest.raises(RuntimeError, match="allocate"):
            model.plan([SequenceShare(0, 1, (number,)) for number in range(30)])
    assert arrays() is not None, "the kernels have their addresses"
    assert torch.equal(model.replay(small), expected)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_levels_and_threads_make_no_difference(tmp_path: Path, level: str, num_threads: int) -> None:
    model = model_of(tmp_path, "llama", level=level, num_threads=num_threads)
    for shares in STEPS:
        assert torch.equal(model.replay(shares), model.run(shares))


def test_each_layer_is_reported_once_its_kv_is_stored(tmp_path: Path) -> None:
    model = model_of(tmp_path)
    layers: list[Tensor] = []
    model.blocks.zero_()
    expected = model.run(STEPS[0])
    stored = model.blocks.clone()
    model.blocks.zero_()
    assert torch.equal(model.replay(STEPS[0], lambda: layers.append(model.blocks.clone())), expected)
    # blocks of this model hold one layer after another
    layer_elements = model.blocks.shape[1] // model.decoder.config.num_layers
    for number, blocks in enumerate(layers):
        end = layer_elements * (number + 1)
        assert torch.equal(blocks[:, :end], stored[:, :end])
        assert not blocks[:, end:].any()
    assert len(layers) == model.decoder.config.num_layers


def test_what_layers_hand_on_shares_memory(tmp_path: Path) -> None:
    model = model_of(tmp_path, "llama")
    threads, decoder = kernels(LEVELS[0], 2), model.decoder
    model.plan([SequenceShare(0, 2, (0,))])
    residual, rotation = decoder.embed(torch.arange(2), torch.arange(2)), decoder.rotations(torch.arange(2))
    with threads.noting() as notes:
        delta = decoder.run_layers(residual, rotation, model.attention)
    recording = Recording(threads, notes, delta, MAX_TOKENS)
    row_bytes = sum(buffer.nbytes for buffer in notes.buffers) // 2
    assert recording.num_bytes < row_bytes * MAX_TOKENS // decoder.config.num_layers


@torch.inference_mode()
@pytest.mark.parametrize("doubled", [lambda logits: logits * 2, lambda logits: logits.mul_(2)])
def test_a_head_that_is_not_only_kernels_is_computed_by_the_decoder(
    tmp_path: Path, doubled: Callable[[Tensor], Tensor]
) -> None:
    model, threads = model_of(tmp_path), kernels(LEVELS[0], 2)
    head = model.decoder.head
    model.decoder.head = lambda residual, delta: doubled(head(residual, delta))  # type: ignore[method-assign]
    recorded = record_layers(model.decoder, model.attention, threads, SIZES)
    assert recorded is not None
    assert recorded.head is None
    expected = model.decoder.logits(model.run(STEPS[0]))
    assert torch.equal(recorded(*model.plan(STEPS[0])).logits(DueRows(9, None)), expected)


@pytest.mark.parametrize(("start", "num_tokens"), [(0, MAX_TOKENS + 1), (MAX_POSITIONS, 1)])
def test_a_step_beyond_the_limit_is_refused_before_anything_is_written(
    tmp_path: Path, start: int, num_tokens: int
) -> None:
    model = model_of(tmp_path)
    assert model.recorded is not None
    before = model.blocks.clone()
    with pytest.raises(RuntimeError, match="there is room for"), torch.inference_mode():
        model.recorded(*model.plan([SequenceShare(start, num_tokens, (0,) * 200)]))
    assert torch.equal(model.blocks, before)


def test_a_token_that_does_not_exist_is_not_looked_up(tmp_path: Path) -> None:
    """Whoever lets one through fails its own request: its logits are no numbers."""
    model = model_of(tmp_path)
    assert model.recorded is not None
    with torch.inference_mode():
        _, positions = model.plan([SequenceShare(0, 1, (1,)), SequenceShare(0, 1, (2,))])
        logits = model.recorded(torch.tensor([2**40, 5]), positions).logits(DueRows(2, None))
    assert logits.isnan().all(dim=1).tolist() == [True, False]


class Doubling:
    """See `Collectives`: another rank has the same summands."""

    def __init__(self) -> None:
        self.num_sums = 0

    def add_up(self, summand: Tensor) -> Tensor:
        self.num_sums += 1
        return summand.add_(summand)

    def side_by_side(self, share: Tensor) -> Tensor:
        return share

    def from_first(self, values: Tensor) -> None:
        raise NotImplementedError


def test_a_recording_is_cut_where_ranks_add_up(tmp_path: Path) -> None:
    threads, others = kernels(LEVELS[0], 2), Doubling()
    folder = make_checkpoint(tmp_path, "qwen3")
    model = Model(folder, "float32", NativeOps(threads), threads, NotedCollectives(others, threads))
    assert model.recorded is not None
    for shares in STEPS:
        expected, others.num_sums = model.run(shares), 0
        told: list[int] = []
        assert torch.equal(model.replay(shares), expected)
        assert others.num_sums == 1 + 2 * model.decoder.config.num_layers
        assert torch.equal(model.replay(shares, lambda: told.append(others.num_sums)), expected)  # noqa: B023
        assert len(told) == model.decoder.config.num_layers


class Foreign:
    """Makes tensors that no kernel returns. A replay reads them once, with more rows: they stay, and there are rows
    behind them, since sanitizers watch."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []

    def made(self, tensor: Tensor) -> Tensor:
        room = torch.zeros(8 + len(tensor), *tensor.shape[1:], dtype=tensor.dtype)
        self._kept.append(room)
        return room[: len(tensor)].copy_(tensor)


FOREIGN = Foreign()


class HalfNativeOps(NativeOps):
    """One operation is torch's, as a part without a kernel would have it."""

    def gate(self, gate_up: Tensor) -> Tensor:
        return FOREIGN.made(super().gate(gate_up))


class ForeignResult(NativeOps):
    """The last operation is torch's."""

    def linear(self, x: Tensor, weight: object, bias: Tensor | None) -> Tensor:
        return FOREIGN.made(super().linear(x, weight, bias))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ops", "reason"),
    [(HalfNativeOps, "not all of it is calls of the kernels"), (ForeignResult, "its result does not come from a call")],
)
def test_a_pass_that_is_not_only_kernels_is_not_recorded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, ops: type[NativeOps], reason: str
) -> None:
    threads = kernels(LEVELS[0])
    with caplog.at_level(logging.WARNING):
        model = Model(make_checkpoint(tmp_path, "llama", dtype="bfloat16"), "bfloat16", ops(threads), threads)
    assert model.recorded is None
    assert [reason in record.getMessage() for record in caplog.records] == [True]
