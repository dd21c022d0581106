"""The arguments that flashinfer gets: page tables, sizes, and recorded decode steps. Kernels are the stand-in's."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from baton.device.base import Graph
from baton.device.emulated import EmulatedDevice, EmulatedStaging
from baton.engine.attention.base import AttentionBackend, SequenceShare, attention_staging_bytes
from baton.engine.attention.flashinfer import FlashInferAttention, FlashInferCalls, PageTable
from baton.engine.attention.flashinfer_limits import (
    GRAPH_INT_WORKSPACE_BYTES,
    float_workspace_bytes,
    int_workspace_bytes,
    unsupported_reason,
    uses_tensor_cores,
)
from baton.engine.cache.block_pool import pack_blocks
from baton.testing.attention import (
    MAX_BLOCKS,
    MAX_SEQUENCES,
    MAX_TOKENS,
    NUM_LAYERS,
    Relay,
    Runner,
    run_ragged_mix,
)
from tests.engine.attention import flashinfer_stand_in as stand_in
from tests.engine.attention.backends import backend, make_backend, paged_of

HOPPER = (9, 0)


class RecordedDecodes:
    """Decode steps of a fixed size, replayed from what the first step recorded, as a runner would."""

    def __init__(self, relay: Relay, size: int) -> None:
        attention = relay.attention.for_graph(size)
        assert attention is not None
        self.relay, self.size, self.attention = relay, size, attention
        heads = relay.num_kv_heads
        widths = [heads * relay.group, heads, heads]
        # one projection, as the decoder makes it: q, k and v are views of it
        self.inputs = [torch.zeros(size, sum(widths), relay.head_dim, dtype=relay.dtype) for _ in range(NUM_LAYERS)]
        self.views = [torch.split(joined, widths, dim=1) for joined in self.inputs]
        self.graph: Graph | None = None
        self.outputs: list[Tensor] = []

    @torch.inference_mode()
    def step(self, *runners: Runner, plan: bool = True) -> None:
        """One token of each, padded with rows in the spare block; the outputs of real rows are compared."""
        relay, spare = self.relay, self.relay.num_blocks - 1
        shares = [runner.share(1) for runner in runners]
        shares += [SequenceShare(0, 1, [spare])] * (self.size - len(shares))
        relay.staging.begin()
        if plan:
            self.attention.plan(shares, relay.staging)
        relay.staging.upload()
        for layer, views in enumerate(self.views):
            for row, runner in enumerate(runners):
                for view, whole in zip(views, runner.qkv[layer], strict=True):
                    view[row] = whole[runner.num_done]
        if self.graph is None:
            self.run()
            self.graph, self.outputs = EmulatedDevice().record(self.run)
        self.graph.replay()
        for layer, output in enumerate(self.outputs):
            relay.compare(layer, [(runner, 1) for runner in runners], output[: len(runners)])
        for runner in runners:
            runner.num_done += 1

    def run(self) -> list[Tensor]:
        return [self.attention.run(layer, *views) for layer, views in enumerate(self.views)]


def decoding_relay(group: int = 4, windows: tuple[int | None, ...] = (None, 5)) -> Relay:
    """A relay on flashinfer whose last block is spare, with three runners behind their prompts."""
    relay = Relay(backend("flashinfer"), group=group, head_dim=64, dtype=torch.bfloat16, windows=windows)
    relay.free.remove(relay.num_blocks - 1)
    relay.kv.fill_(torch.nan)
    for num_tokens in (20, 13, 25):
        relay.add(num_tokens)
    relay.step(7, 3, 11)
    return relay


@pytest.mark.parametrize("group", [1, 3, 4, 7])
@pytest.mark.parametrize("size", [3, 4, 8])
def test_a_recorded_step_computes_whatever_was_planned_last(group: int, size: int) -> None:
    relay = decoding_relay(group)
    recorded = RecordedDecodes(relay, size)
    for _ in range(9):
        recorded.step(*relay.runners)
    first, second, third = relay.runners
    recorded.step(third, first)
    recorded.step(first)
    recorded.step(second)


def test_recorded_and_eager_steps_may_alternate() -> None:
    relay = decoding_relay()
    small, large = RecordedDecodes(relay, 3), RecordedDecodes(relay, 6)
    for _ in range(2):
        small.step(*relay.runners)
        relay.step(1, 2, 1)
        large.step(*relay.runners)
        relay.step(1, 1, 1)


def test_a_replay_without_a_plan_is_noticed() -> None:
    relay = decoding_relay()
    recorded = RecordedDecodes(relay, 4)
    recorded.step(*relay.runners)
    relay.step(1, 1, 1)
    with pytest.raises((ValueError, IndexError)):
        recorded.step(*relay.runners, plan=False)


@pytest.mark.parametrize("shares", [[(0, 1)], [(0, 1), (0, 1), (0, 1)], [(0, 1), (0, 2)]])
def test_a_graph_takes_steps_of_its_size_only(shares: list[tuple[int, int]]) -> None:
    relay = decoding_relay()
    attention = relay.attention.for_graph(2)
    assert attention is not None
    relay.staging.begin()
    with pytest.raises(ValueError, match="2 shares of one token"):
        attention.plan([SequenceShare(start, count, [0]) for start, count in shares], relay.staging)


@pytest.mark.parametrize("is_other_staging", [False, True])
def test_a_staging_that_moved_is_refused(is_other_staging: bool) -> None:
    relay = decoding_relay()
    attention = relay.attention.for_graph(1)
    assert attention is not None
    share = relay.runners[0].share(1)
    relay.staging.begin()
    attention.plan([share], relay.staging)
    other = EmulatedStaging(attention_staging_bytes(MAX_TOKENS, MAX_SEQUENCES, MAX_BLOCKS))
    staging = other if is_other_staging else relay.staging
    staging.begin()
    if not is_other_staging:
        staging.put(np.zeros(1, dtype=np.int32))
    with pytest.raises(ValueError, match="the staging moved"):
        attention.plan([share], staging)


def test_a_recorded_step_copies_no_more_than_the_blocks_in_use() -> None:
    relay = decoding_relay()
    attention = relay.attention.for_graph(3)
    assert attention is not None
    puts: list[tuple[int, int]] = []

    class Noting(EmulatedStaging):
        def put(self, values: np.ndarray, capacity: int = 0) -> Tensor:
            puts.append((len(values), capacity))
            return super().put(values, capacity)

    attention.plan([runner.share(1) for runner in relay.runners], Noting(2**16))
    # 8, 4 and 12 tokens in blocks of 4; the indices come last, so their room behind 2 + 1 + 3 blocks is not copied
    assert puts == [(4, 0), (3, 0), (3, 0), (3, 0), (6, 3 * MAX_BLOCKS)]


def test_one_plan_for_each_window_and_kind() -> None:
    plans: list[tuple[str, int]] = []

    class Decode(stand_in.BatchDecodeWithPagedKVCacheWrapper):
        def plan(self, *inputs: Any, **options: Any) -> None:
            plans.append(("decode", options["window_left"]))
            super().plan(*inputs, **options)

    class Prefill(stand_in.BatchPrefillWithPagedKVCacheWrapper):
        def plan(self, *inputs: Any, **options: Any) -> None:
            plans.append(("prefill", options["window_left"]))
            super().plan(*inputs, **options)

    relay = Relay(backend("flashinfer"), group=2, head_dim=64, dtype=torch.bfloat16, windows=(None, 5))
    calls = dataclasses.replace(
        stand_in.CALLS, BatchDecodeWithPagedKVCacheWrapper=Decode, BatchPrefillWithPagedKVCacheWrapper=Prefill
    )
    relay.attention = backend_on(calls, relay)
    run_ragged_mix(relay)
    decodes, prefills = [("decode", -1), ("decode", 4)], [("prefill", -1), ("prefill", 4)]
    # the steps: a single token and prompts; single tokens and a chunk; single tokens; a chunk
    assert [sorted(plans[first : first + 4]) for first in (0, 4)] == [sorted(decodes + prefills)] * 2
    assert [sorted(plans[8:10]), sorted(plans[10:])] == [sorted(decodes), sorted(prefills)]


def backend_on(calls: FlashInferCalls, relay: Relay) -> AttentionBackend:
    num_heads = relay.num_kv_heads * relay.group
    return FlashInferAttention(
        calls,
        relay.paged,
        num_heads=num_heads,
        workspace=torch.zeros(2**28, dtype=torch.uint8),
        max_blocks_per_sequence=MAX_BLOCKS,
    )


def test_page_tables_count_as_flashinfer_does() -> None:
    shares = [SequenceShare(8, 1, pack_blocks([5, 6, 7, 9])), SequenceShare(0, 3, [1]), SequenceShare(6, 2, (2, 3))]
    pages = PageTable.of(shares, 4)
    assert pages.indptr.tolist() == [0, 3, 4, 6]
    assert pages.indices.tolist() == [5, 6, 7, 1, 2, 3]
    assert pages.last_page_len.tolist() == [1, 3, 4]
    assert pages.batch_indices.tolist() == [0, 1, 1, 1, 2, 2]
    assert pages.positions.tolist() == [8, 0, 1, 2, 6, 7]
    assert {getattr(pages, field.name).dtype for field in dataclasses.fields(pages)} == {np.dtype(np.int32)}


def test_a_table_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="does not cover the context"):
        PageTable.of([SequenceShare(0, 3, [1]), SequenceShare(8, 1, pack_blocks([5, 6]))], 4)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "dtype", "capability", "words"),
    [
        (32, 8, 128, torch.bfloat16, (7, 5), "compute capability 7.5"),
        (32, 8, 128, torch.float32, HOPPER, "not in float32"),
        (4, 2, 32, torch.bfloat16, HOPPER, "heads of size 32, only for 64, 128, 256"),
        (32, 32, 80, torch.float16, HOPPER, "heads of size 80"),
        (32, 32, 96, torch.float16, HOPPER, "heads of size 96"),
        (12, 8, 64, torch.float16, HOPPER, "12 query heads cannot share 8"),
        (64, 64, 256, torch.float16, HOPPER, "cannot store 64 key heads of size 256"),
    ],
)
def test_what_it_cannot_compute_is_said_beforehand(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, capability: tuple[int, int], words: str
) -> None:
    reason = unsupported_reason(num_heads, num_kv_heads, head_dim, dtype, capability)
    assert reason is not None
    assert words in reason


@pytest.mark.parametrize("shape", [(32, 8, 128), (14, 2, 64), (64, 8, 128), (32, 32, 128), (12, 2, 128), (16, 16, 256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_shapes_of_common_models_are_supported(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    assert unsupported_reason(*shape, dtype, (8, 0)) is None
    assert unsupported_reason(*shape, dtype, HOPPER) is None


def test_groups_that_the_other_kernel_lacks_use_tensor_cores() -> None:
    assert {group for group in range(1, 65) if not uses_tensor_cores(group)} == {1, 2, 3}


@pytest.mark.parametrize("shape", [(32, 8, 128), (14, 2, 64), (64, 8, 128), (16, 16, 256), (128, 4, 128), (71, 1, 64)])
@pytest.mark.parametrize("size", [1, 256, 1024])
def test_workspaces_are_large_enough_for_every_plan(shape: tuple[int, int, int], size: int) -> None:
    num_heads, num_kv_heads, head_dim = shape
    kv = torch.zeros(4, 1, 2, num_kv_heads, 16, head_dim, dtype=torch.float16)
    num_bytes = float_workspace_bytes(num_heads, num_kv_heads, head_dim, stand_in.NUM_PROCESSORS, size)
    attention = FlashInferAttention(
        stand_in.CALLS,
        paged_of(kv, (None,)),
        num_heads=num_heads,
        workspace=torch.empty(num_bytes, dtype=torch.uint8),
        max_blocks_per_sequence=2,
    )
    staging = EmulatedStaging(attention_staging_bytes(size * 2, size, 2))
    staging.begin()
    attention.plan([SequenceShare(20, 2, [0, 1])] * size, staging)
    decodes = attention.for_graph(size)
    staging.begin()
    decodes.plan([SequenceShare(20, 1, [0, 1])] * size, staging)


def test_the_memory_that_is_announced_is_what_wrappers_take() -> None:
    sizes: list[int] = []

    class Noting(stand_in.BatchDecodeWithPagedKVCacheWrapper):
        def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
            sizes.append(int_workspace_buffer.data_ptr())
            super().reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    relay = Relay(backend("flashinfer"), group=2, head_dim=64, dtype=torch.bfloat16, windows=(None, 5))
    attention = backend_on(dataclasses.replace(stand_in.CALLS, BatchDecodeWithPagedKVCacheWrapper=Noting), relay)
    for size in (1, 2, 4):
        graph = attention.for_graph(size)
        assert graph is not None
        relay.staging.begin()
        graph.plan([SequenceShare(0, 1, [0])] * size, relay.staging)
    # all sizes share one int workspace for each window, beside the 8 MiB that each of the four eager wrappers takes
    assert len(sizes) == 6
    assert len(set(sizes)) == 2
    assert int_workspace_bytes(2) == 4 * 8 * 2**20 + 2 * GRAPH_INT_WORKSPACE_BYTES


def test_every_step_fits_the_staging_that_was_announced() -> None:
    for name in ("torch", "flashinfer"):
        kv = torch.zeros(64, 2, 2, 2, 4, 64, dtype=torch.float16)
        attention = make_backend(name, paged_of(kv, (None, 3)), 4)
        for counts in ([1] * 8, [32] * 8, [249, *[1] * 7], [1] * 4 + [9] * 4):
            shares = [SequenceShare(128 - count if count < 128 else 0, count, list(range(64))) for count in counts]
            num_blocks = max(-(-share.context_len // 4) for share in shares)
            staging = EmulatedStaging(attention_staging_bytes(sum(counts), len(counts), num_blocks))
            staging.begin()
            attention.plan(shares, staging)
