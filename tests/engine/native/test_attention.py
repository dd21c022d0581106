"""Attention of the CPU kernels against float64, at each dispatch level that this processor can run.

What no result may depend on holds NaN here: slots behind a context, blocks that a window hides, blocks of nobody.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
from dataclasses import dataclass, replace
from functools import cache, cached_property

import pytest
import torch
from torch import Tensor

from baton.engine.attention.base import PLAIN, LayerRule
from tests.engine.native.calls import Share, Threads
from tests.engine.native.compiled import needs_kernels

pytestmark = needs_kernels

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = list(TOLERANCES)


def dense(q: Tensor, k: Tensor, v: Tensor, start: int, window: int, rule: LayerRule = PLAIN) -> Tensor:
    """Attention in float64 of q [T, Hq, D] at the positions start ... over k and v [S, Hkv, D]."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(group, dim=1).transpose(0, 1) for x in (k, v))
    scores = q.double().transpose(0, 1) @ keys.transpose(1, 2) / q.shape[2] ** 0.5
    positions = torch.arange(start, start + len(q))[:, None]
    keys_seen = torch.arange(len(k))
    hidden = (keys_seen > positions) | (keys_seen <= positions - (window or len(k) + 1))
    if rule.cap is not None:
        scores = rule.cap * (scores / rule.cap).tanh()
    scores = scores.masked_fill(hidden, -torch.inf)
    if rule.sinks is not None:
        scores = torch.cat((scores, rule.sinks.double()[:, None, None].expand(-1, len(q), 1)), dim=-1)
    weights: Tensor = scores.softmax(-1)[..., : len(k)]
    return (weights @ values).transpose(0, 1)


@dataclass
class Sequences:
    """Sequences with random keys and values in a pool of two layers, of which the second is attended to."""

    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]
    shares: list[Share]
    planes: Tensor
    window: int

    @staticmethod
    @cache  # levels take the same
    def random(
        *shapes: tuple[int, int],
        dtype: torch.dtype = torch.float32,
        heads: tuple[int, int] = (4, 2),
        head_dim: int = 32,
        block_size: int = 16,
        window: int = 0,
    ) -> Sequences:
        """`shapes`: (start, num_tokens) of each sequence; `heads`: of queries, and of keys and values."""
        random = torch.Generator().manual_seed(len(shapes) + head_dim)
        num_blocks = [-(-(start + count) // block_size) for start, count in shapes]
        pool = torch.full((sum(num_blocks) + 3, 2, 2, heads[1], block_size, head_dim), torch.nan, dtype=dtype)
        free = torch.randperm(len(pool), generator=random).tolist()
        q, k, v, shares = [], [], [], []
        for (start, count), blocks in zip(shapes, num_blocks, strict=True):
            q.append(torch.randn(count, heads[0], head_dim, generator=random).to(dtype))
            keys, values = (torch.randn(start + count, heads[1], head_dim, generator=random).to(dtype) for _ in "kv")
            k.append(keys)
            v.append(values)
            shares.append(Share(start, count, [free.pop() for _ in range(blocks)]))
            seen_from = max(0, start + 1 - window) if window else 0
            for position in range(seen_from, start + count):
                block, place = shares[-1].table[position // block_size], position % block_size
                pool[block, 1, 0, :, place] = keys[position]
                pool[block, 1, 1, :, place] = values[position]
        return Sequences(q, k, v, shares, pool[:, 1], window)

    @cached_property
    def expected(self) -> list[Tensor]:
        """In float64."""
        starts = [share.start for share in self.shares]
        return [dense(*each, self.window) for each in zip(self.q, self.k, self.v, starts, strict=True)]

    def attend(self, threads: Threads, *numbers: int) -> list[Tensor]:
        """The results of the sequences `numbers` (all without any), computed in one step."""
        chosen = numbers or range(len(self.shares))
        shares = [self.shares[i] for i in chosen]
        found = threads.attend(self.planes, shares, torch.cat([self.q[i] for i in chosen]), self.window)
        return list(torch.split(found, [share.num_tokens for share in shares]))

    def check(self, threads: Threads) -> None:
        for found, expected in zip(self.attend(threads), self.expected, strict=True):
            tolerance = TOLERANCES[found.dtype]
            message = f"{tuple(found.shape)} {found.dtype} in {tuple(self.planes.shape)}, window {self.window}: "
            torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance, msg=message.__add__)


RAGGED = ((0, 1), (0, 37), (16, 1), (5, 3), (33, 20), (140, 1), (127, 2))


def test_any_head_size(two_threads: Threads) -> None:
    for head_dim, dtype in itertools.product((6, 7, 16, 64, 80, 128, 200, 512), DTYPES):
        Sequences.random(*RAGGED, head_dim=head_dim, dtype=dtype).check(two_threads)


def test_any_number_of_heads(two_threads: Threads) -> None:
    for heads, dtype in itertools.product(((1, 1), (3, 3), (6, 2), (7, 1), (16, 2), (17, 1), (100, 1)), DTYPES):
        Sequences.random(*RAGGED, heads=heads, dtype=dtype).check(two_threads)


def test_any_block_size(two_threads: Threads) -> None:
    for block_size in (1, 2, 3, 8, 16, 31, 32, 64, 256):
        Sequences.random(*RAGGED, block_size=block_size, dtype=torch.bfloat16).check(two_threads)


def test_any_window(two_threads: Threads) -> None:
    for window, dtype in itertools.product((1, 2, 7, 16, 100, 128, 1000), DTYPES):
        Sequences.random(*RAGGED, (700, 1), (600, 40), window=window, dtype=dtype).check(two_threads)


def test_long_contexts(two_threads: Threads) -> None:
    shapes = ((0, 600), (1500, 1), (1023, 1), (1024, 1), (900, 200), (511, 1), (512, 1), (0, 512))
    for window, dtype in itertools.product((0, 600), DTYPES):
        Sequences.random(*shapes, window=window, dtype=dtype).check(two_threads)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_result_depends_on_nothing_else_in_the_step_and_on_no_threads(
    one_thread: Threads, two_threads: Threads, dtype: torch.dtype
) -> None:
    sequences = Sequences.random((1500, 1), (0, 130), (40, 1), (700, 3), (600, 70), dtype=dtype, head_dim=64)
    together = sequences.attend(two_threads)
    assert all(torch.equal(a, b) for a, b in zip(together, sequences.attend(one_thread), strict=True))
    for i, expected in enumerate(together):
        assert torch.equal(sequences.attend(two_threads, i)[0], expected)
        assert torch.equal(sequences.attend(one_thread, i)[0], expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_result_does_not_depend_on_how_heads_are_divided(
    one_thread: Threads, two_threads: Threads, dtype: torch.dtype
) -> None:
    # two threads take two heads of five at once, one thread takes all
    sequences = Sequences.random(*((600 + i, 1) for i in range(8)), dtype=dtype, head_dim=64, heads=(10, 5))
    sequences.check(two_threads)
    together = sequences.attend(two_threads)
    assert all(torch.equal(a, b) for a, b in zip(together, sequences.attend(one_thread), strict=True))
    assert torch.equal(sequences.attend(two_threads, 3)[0], together[3])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "window"), [(48, 300), (64, 0)])
def test_a_result_does_not_depend_on_how_a_prompt_is_divided(
    two_threads: Threads, window: int, head_dim: int, dtype: torch.dtype
) -> None:
    whole = Sequences.random((0, 700), dtype=dtype, head_dim=head_dim, window=window, heads=(3, 1))
    [expected] = whole.attend(two_threads)
    table = whole.shares[0].table
    for start, count in [(0, 1), (1, 50), (127, 2), (511, 1), (512, 1), (513, 4), (600, 100), (699, 1)]:
        q = whole.q[0][start : start + count]
        found = two_threads.attend(whole.planes, [Share(start, count, table)], q, window)
        assert torch.equal(found, expected[start : start + count])


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_may_be_large(two_threads: Threads, dtype: torch.dtype) -> None:
    sequences = Sequences.random((0, 40), (600, 1), dtype=dtype)
    large = replace(sequences, q=[q * 40 for q in sequences.q])
    tolerance = 10 * TOLERANCES[dtype]
    for found, expected in zip(large.attend(two_threads), large.expected, strict=True):
        torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)


RULED = ((0, 37), (5, 3), (700, 1), (1500, 1), (600, 40))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cap", [None, 2.0, 50.0])
@pytest.mark.parametrize("sink", [None, -200.0, 0.5, 6.0, 200.0])
def test_scores_may_be_capped_and_have_sinks(
    two_threads: Threads, dtype: torch.dtype, cap: float | None, sink: float | None
) -> None:
    sequences = Sequences.random(*RULED, dtype=dtype, head_dim=64)
    sinks = None if sink is None else torch.tensor([sink, 0.0, 1.5, -sink]).to(dtype)
    rule = LayerRule(cap=cap, sinks=sinks)
    q = [3 * each for each in sequences.q]
    found = two_threads.attend(sequences.planes, sequences.shares, torch.cat(q), rule=rule)
    starts = [share.start for share in sequences.shares]
    for i, each in enumerate(torch.split(found, [share.num_tokens for share in sequences.shares])):
        expected = dense(q[i], sequences.k[i], sequences.v[i], starts[i], 0, rule)
        tolerance = 2 * TOLERANCES[dtype]
        torch.testing.assert_close(each.double(), expected, atol=tolerance, rtol=tolerance)
        alone = two_threads.attend(sequences.planes, sequences.shares[i : i + 1], q[i], rule=rule)
        assert torch.equal(each, alone)


def test_what_is_no_number_stays_in_its_row(two_threads: Threads) -> None:
    sequences = Sequences.random((0, 9), (20, 1))
    q = torch.cat(sequences.q)
    q[4, 1] = torch.nan
    found = two_threads.attend(sequences.planes, sequences.shares, q)
    assert found[4, 1].isnan().all()
    assert found.isnan().sum() == found.shape[-1]


def test_queries_may_be_views_of_one_projection(two_threads: Threads) -> None:
    for dtype in DTYPES:
        sequences = Sequences.random((0, 30), dtype=dtype)
        joined = torch.cat([sequences.q[0], sequences.q[0]], dim=1)
        found = two_threads.attend(sequences.planes, sequences.shares, joined[:, 4:])
        assert torch.equal(found, sequences.attend(two_threads)[0])


@pytest.mark.parametrize(("head_dim", "block_size", "num_tokens"), [(6, 1, 5), (64, 16, 40), (7, 3, 1)])
def test_tokens_are_stored_in_their_slots_alone(
    two_threads: Threads, head_dim: int, block_size: int, num_tokens: int
) -> None:
    for dtype in DTYPES:
        pool = torch.randn(50, 2, 2, 3, block_size, head_dim).to(dtype)
        slots = torch.randperm(50 * block_size)[:num_tokens]
        joined = torch.randn(num_tokens, 9, head_dim).to(dtype)
        k, v = joined[:, 3:6], joined[:, 6:]
        expected = pool.clone()
        expected[slots // block_size, 1, 0, :, slots % block_size] = k
        expected[slots // block_size, 1, 1, :, slots % block_size] = v
        two_threads.store(pool[:, 1], slots, k, v)
        assert torch.equal(pool, expected)


class GuardedPages:
    """Memory that ends where no page can be read or written."""

    _GUARD = 16 * mmap.PAGESIZE

    def __init__(self, num_bytes: int) -> None:
        self._size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory = mmap.mmap(-1, self._size + self._GUARD)
        begin = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        assert libc.mprotect(begin + self._size, self._GUARD, 0) == 0

    def holding(self, tensor: Tensor, num_hidden: int = 0) -> Tensor:
        """A copy of `tensor` whose last `num_hidden` elements lie behind the end, and the others before it."""
        num_shown = tensor.numel() - num_hidden
        offset = self._size - num_shown * tensor.element_size()
        copy = torch.frombuffer(self._memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
        copy[:num_shown] = tensor.flatten()[:num_shown]
        return copy.view(tensor.shape)


@pytest.mark.parametrize("shape", [(0, 5), (18, 1), (3, 40)])
def test_nothing_is_read_or_written_outside(two_threads: Threads, shape: tuple[int, int]) -> None:
    for head_dim, dtype in itertools.product((6, 7, 80, 128), DTYPES):
        sequences = Sequences.random(shape, head_dim=head_dim, dtype=dtype, block_size=16)
        share = sequences.shares[0]
        # the values of the last head of the last block end with the last token
        num_blocks = len(share.table)
        used = sequences.planes[share.table].contiguous()
        num_hidden = (16 * num_blocks - sum(shape)) * head_dim
        planes = GuardedPages(used.numel() * used.element_size()).holding(used, num_hidden)
        q = GuardedPages(1 << 18).holding(sequences.q[0])
        out = GuardedPages(1 << 18).holding(torch.zeros_like(sequences.q[0]))
        two_threads.attend(planes, [Share(share.start, share.num_tokens, range(num_blocks))], q, out=out)
        assert torch.equal(out, sequences.attend(two_threads)[0])
