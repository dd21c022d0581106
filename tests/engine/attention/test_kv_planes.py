"""KV in codes of 8 bits: what a code stands for, and that attention over codes is attention over just that."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch
from torch import Tensor

from baton.device.emulated import EmulatedStaging
from baton.engine.attention.base import AttentionBackend, SequenceShare, attention_staging_bytes
from baton.engine.attention.kv_planes import decoded, encoded
from baton.engine.attention.native_backend import NativeAttention
from baton.engine.attention.paged_kv import PagedKv
from baton.engine.attention.torch_backend import TorchAttention
from baton.wire.layout import DTYPE_BYTES, FP8_E4M3, KvLayout, LayerKv
from tests.engine.models.rounded_kv import rounded
from tests.engine.native.compiled import LEVELS, kernels

NUM_KV_HEADS = 2
TABLES = [list(range(0, 24)), list(range(100, 24, -1))]
STEPS = [
    [(0, 0, 7)],
    [(0, 7, 1), (1, 0, 70)],
    [(1, 70, 1), (0, 8, 1)],
    [(1, 71, 530)],
    [(1, 601, 2), (0, 9, 15)],
    [(1, 603, 1)],
]
"""Of each step: sequence, first position, number of tokens."""


def test_a_row_has_the_nearest_codes_under_the_least_power_of_two() -> None:
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(200, 64, generator=random) * torch.exp2(torch.randint(-90, 90, (200, 1), generator=random))
    rows[0], rows[1, :32], rows[2, 5] = 0.0, 0.0, rows[2].abs().max() * 2.0**20
    rows[3] = torch.linspace(-448, 448, 64)
    numbers = torch.tensor(
        [m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)]
    )
    numbers = numbers[:-1].double()  # the last one stands for no number
    codes, scales = encoded(rows)
    for row, found, scale in zip(rows.double(), codes.int(), scales.int(), strict=True):
        power = 2.0 ** (int(scale) - 127)
        assert row.abs().max() <= 448 * power
        assert row.abs().max() > 224 * power or int(scale) == 10
        distance = (row.abs()[:, None] / power - numbers).abs()
        nearest = distance == distance.amin(1, keepdim=True)
        for number, code in enumerate(found & 0x7F):
            ties = nearest[number].nonzero()[:, 0].tolist()
            assert code in ties
            assert len(ties) == 1 or code % 2 == 0
    assert torch.equal(decoded(codes, scales).signbit()[rows != 0], rows.signbit()[rows != 0])


def pool_of(kv_dtype: str, dtype: torch.dtype, head_dim: int, block_size: int, fill: int) -> PagedKv:
    layers = [LayerKv(NUM_KV_HEADS, head_dim), LayerKv(NUM_KV_HEADS, head_dim, window=40)]
    layout = KvLayout.of_layers(kv_dtype, block_size, layers)
    memory = torch.full((101, layout.block_bytes), fill, dtype=torch.uint8)
    return PagedKv(layout, memory if kv_dtype == FP8_E4M3 else memory.view(dtype))


def backend_of(name: str, pool: PagedKv, dtype: torch.dtype, num_heads: int) -> AttentionBackend:
    if name == "torch":
        return TorchAttention(pool)
    return NativeAttention(kernels(name), pool, num_heads, (), dtype)


@cache
def inputs(
    head_dim: int, dtype: torch.dtype, num_heads: int, *, is_rounded: bool
) -> list[list[tuple[Tensor, Tensor, Tensor]]]:
    """Queries, keys and values of `STEPS` in both layers; keys and values are rounded, or not."""
    if is_rounded:
        plain = inputs(head_dim, dtype, num_heads, is_rounded=False)
        return [[(q, rounded(k), rounded(v)) for q, k, v in layers] for layers in plain]
    random = torch.Generator().manual_seed(1)

    def normal(shares: list[tuple[int, int, int]], num_heads: int) -> Tensor:
        return torch.randn(sum(count for _, _, count in shares), num_heads, head_dim, generator=random)

    def layer(shares: list[tuple[int, int, int]]) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (normal(shares, heads).to(dtype) for heads in (num_heads, NUM_KV_HEADS, NUM_KV_HEADS))
        k, v = k * 30, v / 200
        if len(q) > 500 and dtype != torch.float16:  # there these have no numbers
            # of some tokens the scales are not moderate
            k[100:102], v[203], v[310, 1] = k[100:102] * 2.0**-50, v[203] * 2.0**-70, v[310, 1] * 2.0**40
            k[250, 0], v[420] = 0.0, 0.0
        return q, k, v

    return [[layer(shares) for _ in range(2)] for shares in STEPS]


def run(attention: AttentionBackend, given: list[list[tuple[Tensor, Tensor, Tensor]]]) -> list[Tensor]:
    """The results of `STEPS` in both layers."""
    found = []
    staging = EmulatedStaging(attention_staging_bytes(600, 2, 77))
    for shares, layers in zip(STEPS, given, strict=True):
        staging.begin()
        attention.plan([SequenceShare(start, count, TABLES[i]) for i, start, count in shares], staging)
        staging.upload()
        found += [attention.run(layer, *qkv) for layer, qkv in enumerate(layers)]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("head_dim", "block_size", "num_heads"), [(64, 16, 6), (80, 8, 6), (128, 32, 2), (96, 16, 4), (64, 16, 16)]
)
@pytest.mark.parametrize("backend", ["torch", *LEVELS])
def test_attention_over_codes_is_attention_over_what_they_stand_for(
    backend: str, head_dim: int, block_size: int, num_heads: int, dtype: torch.dtype
) -> None:
    results = []
    for kv_dtype in (FP8_E4M3, str(dtype).removeprefix("torch.")):
        pool = pool_of(kv_dtype, dtype, head_dim, block_size, fill=0xFF)
        attention = backend_of(backend, pool, dtype, num_heads)
        results.append(run(attention, inputs(head_dim, dtype, num_heads, is_rounded=kv_dtype != FP8_E4M3)))
    for of_codes, of_numbers in zip(*results, strict=True):
        assert not of_numbers.isnan().any()
        assert torch.equal(of_codes, of_numbers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", LEVELS)
def test_a_small_weight_of_a_small_value_is_not_lost(backend: str, dtype: torch.dtype) -> None:
    # nearly all weight is that of a value of zeros: the others have about 2^-20 each
    k = torch.tensor([14.0, -0.125, 0.25])[:, None, None] * torch.eye(64)[0].expand(3, NUM_KV_HEADS, 64)
    v = torch.tensor([0.0, 2.0**-100, 2.0**-99])[:, None, None].expand(3, NUM_KV_HEADS, 64)
    q = (8 * torch.eye(64)[0]).expand(3, 6, 64)
    q, k, v = (each.contiguous().to(dtype) for each in (q, k, v))
    results = []
    for kv_dtype in (FP8_E4M3, str(dtype).removeprefix("torch.")):
        attention = backend_of(backend, pool_of(kv_dtype, dtype, 64, 16, fill=0xFF), dtype, 6)
        staging = EmulatedStaging(attention_staging_bytes(600, 2, 77))
        for first, last in ((0, 2), (2, 3)):
            staging.begin()
            attention.plan([SequenceShare(first, last - first, TABLES[0])], staging)
            staging.upload()
            results.append(attention.run(0, q[first:last], rounded(k[first:last]), rounded(v[first:last])))
    assert (results[3] > 0).all()
    assert torch.equal(results[1], results[3])


@cache
def stored_blocks(backend: str, dtype: torch.dtype) -> Tensor:
    """What the pool holds after all steps."""
    pool = pool_of(FP8_E4M3, dtype, 72, 8, fill=0)
    run(backend_of(backend, pool, dtype, 6), inputs(72, dtype, 6, is_rounded=False))
    return pool.blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", LEVELS)
def test_kernels_store_the_codes_that_torch_stores(backend: str, dtype: torch.dtype) -> None:
    blocks = stored_blocks(backend, dtype)
    assert torch.equal(blocks, stored_blocks("torch", dtype))
    assert blocks.any()


@pytest.mark.parametrize("backend", ["torch", *LEVELS])
def test_a_key_that_is_no_number_makes_its_own_sequence_none(backend: str) -> None:
    pool = pool_of(FP8_E4M3, torch.float32, 64, 16, fill=0)
    attention = backend_of(backend, pool, torch.float32, 6)
    for number, bad in itertools.product((0, 1), (torch.nan, torch.inf)):
        staging = EmulatedStaging(attention_staging_bytes(600, 2, 77))
        staging.begin()
        attention.plan([SequenceShare(0, 3, TABLES[0]), SequenceShare(0, 3, TABLES[1])], staging)
        staging.upload()
        q, k, v = torch.ones(6, 6, 64), torch.ones(6, NUM_KV_HEADS, 64), torch.ones(6, NUM_KV_HEADS, 64)
        (k if number else v)[1, :, 3] = bad
        found = attention.run(0, q, k, v)
        assert found[1:3].isnan().any()
        assert number or found[1:3].isnan().all()
        assert torch.equal(found[3:], torch.ones(3, 6, 64))


def test_a_token_takes_half_the_memory_of_bfloat16() -> None:
    layers = [LayerKv(8, 128)] * 28
    plain, codes = (KvLayout.of_layers(dtype, 16, layers).block_bytes for dtype in ("bfloat16", FP8_E4M3))
    assert codes == 16 * 28 * 2 * 8 * (128 + 1)
    assert codes / plain == pytest.approx(0.504, abs=0.001)
    assert set(DTYPE_BYTES) == {"float32", "float16", "bfloat16", FP8_E4M3}
