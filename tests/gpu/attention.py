"""Attention against exact attention in float64: which heads, blocks and batches every backend must get right, and what
it must have left in the KV pool.

Owns the grid, the inputs of a case and the exact result. A pool is full of NaN before a case, except for what earlier
steps would have left: so a backend that lets anything through that it must not see gives NaN. Inputs are random in
every case.

Letters: T tokens of the step, Hq query heads, Hkv key heads, D head size, B blocks, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baton.device.base import Device
from baton.engine.attention.base import AttentionBackend, SequenceShare
from baton.engine.attention.paged_kv import PagedKv
from baton.engine.models.decoder import TORCH_DTYPES
from baton.wire.layout import KvLayout, LayerKv

DTYPES = ("bfloat16", "float16")
HEAD_SIZES = (128, 64)
GROUPS = (4, 1, 8, 7)
"""Query heads per key head."""
BLOCK_SIZES = (16, 32, 64)
NUM_KV_HEADS = 2
WINDOWS: tuple[int | None, ...] = (None, 37)
"""One entry a layer; every case runs all layers."""
BATCHES = ("decode", "prefill", "prefix", "mixed")

ERROR_BOUNDS = {"bfloat16": 2e-2, "float16": 3e-3, "float32": 2e-5}
"""Largest error of an element over the largest value of the exact result: rounding of weights and results."""
_STAGING_BYTES = 2**25
_SPARE_BLOCKS = 7
GRAPH_SIZES = (1, 3, 8)
MAX_TABLE = 32
"""Blocks of the longest sequence of a recorded step."""

MakeBackend = Callable[[Tensor, int, Device], AttentionBackend]
"""(KV tensor, query heads, device): a backend over it."""


def paged_of(kv: Tensor, windows: Sequence[int | None] | None = None) -> PagedKv:
    """The pool [B, L, 2, Hkv, block_size, D] as backends take it; `windows`: one entry per layer."""
    dtype = next(name for name, kind in TORCH_DTYPES.items() if kind == kv.dtype)
    layers = [LayerKv(kv.shape[3], kv.shape[5], window) for window in windows or WINDOWS]
    return PagedKv(KvLayout.of_layers(dtype, kv.shape[4], layers), kv.flatten(1))


@dataclass(frozen=True, slots=True)
class Share:
    """One sequence of a batch: tokens `start` .. `start + num_tokens - 1` are new.

    The KV of the first `num_shared` tokens lies in blocks of the nearest sequence before it that shares none: a prefix
    hit. Those tokens are older than the step in both.
    """

    start: int
    num_tokens: int
    num_shared: int = 0


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """One step. `group`: query heads per key head."""

    group: int
    block_size: int
    batch: str

    def __str__(self) -> str:
        return f"{self.batch}, group {self.group}, blocks of {self.block_size}"

    def shares(self) -> list[Share]:
        """The sequences of the step, at and around the borders of blocks."""
        size = self.block_size
        decodes = [Share(context - 1, 1) for context in (1, size - 1, size, size + 1, 3 * size + 5, 203)]
        prompts = [Share(0, length) for length in (2, size, size + 1, 150)]
        prefixes = [
            Share(2 * size, 3),
            Share(2 * size, 9, num_shared=2 * size),
            Share(2 * size, 1, num_shared=2 * size),
            Share(size + 3, 41),
            Share(4 * size, size),
        ]
        batches = {
            "decode": decodes,
            "prefill": prompts,
            "prefix": prefixes,
            "mixed": [*decodes[:3], *prompts[1:], *prefixes],
        }
        return batches[self.batch]


def attention_cases(*, quick: bool) -> list[AttentionCase]:
    """The grid for one dtype and head size. `quick` keeps every pair of a group and a batch, and of a block size and a
    batch, with one of three block sizes in turn.
    """
    cases = []
    for row, group in enumerate(GROUPS):
        for column, batch in enumerate(BATCHES):
            sizes = (BLOCK_SIZES[(row + column) % len(BLOCK_SIZES)],) if quick else BLOCK_SIZES
            cases += [AttentionCase(group, size, batch) for size in sizes]
    return cases


@dataclass(frozen=True, slots=True)
class Inputs:
    """One case with tensors.

    `kv`: what earlier steps left, [B, L, 2, Hkv, block_size, D]. `fused`: the layers' projections,
    [L, T, Hq + 2 Hkv, D]. `exact`: the result, [L, T, Hq, D] float64. `stored`: the KV that must be there afterwards.
    """

    shares: tuple[SequenceShare, ...]
    num_heads: int
    kv: Tensor
    fused: Tensor
    exact: Tensor
    stored: Tensor


def make_inputs(case: AttentionCase, dtype: str, head_dim: int, device: torch.device, seed: int) -> Inputs:
    """Random inputs of a case, and what must come of them."""
    chance = torch.Generator().manual_seed(seed)
    num_heads, size, planned = case.group * NUM_KV_HEADS, case.block_size, case.shares()
    tables = _tables(planned, size, chance)
    shares = tuple(SequenceShare(s.start, s.num_tokens, t) for s, t in zip(planned, tables, strict=True))
    num_blocks = 1 + max(max(table) for table in tables) + _SPARE_BLOCKS
    num_layers, num_tokens = len(WINDOWS), sum(share.num_tokens for share in shares)
    kind = TORCH_DTYPES[dtype]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=chance).to(device, kind)

    fused = normal(num_layers, num_tokens, num_heads + 2 * NUM_KV_HEADS, head_dim)
    kv = torch.full((num_blocks, num_layers, 2, NUM_KV_HEADS, size, head_dim), math.nan, dtype=kind, device=device)
    # earlier steps first: a block that one of them began is clean behind its last token
    for share in shares:
        for block in share.block_table[: -(-share.start // size)]:
            kv[block] = 0
    for share in shares:
        blocks, slots = _places(share.block_table, 0, share.start, size, device)
        kv[blocks, :, :, :, slots] = normal(share.start, num_layers, 2, NUM_KV_HEADS, head_dim)
    stored = kv.clone()
    first = 0
    for share in shares:
        new = fused[:, first : first + share.num_tokens, num_heads:]
        new = new.reshape(num_layers, share.num_tokens, 2, NUM_KV_HEADS, head_dim)
        blocks, slots = _places(share.block_table, share.start, share.context_len, size, device)
        stored[blocks, :, :, :, slots] = new.transpose(0, 1)
        first += share.num_tokens
    exact = torch.stack([_exact(fused[i, :, :num_heads], stored[:, i], shares, WINDOWS[i]) for i in range(num_layers)])
    return Inputs(shares, num_heads, kv, fused, exact, stored)


@torch.inference_mode()
def check_case(make: MakeBackend, inputs: Inputs, device: Device) -> tuple[float, int]:
    """(largest error over the largest exact value, number of stored values that differ) of a backend."""
    kv = inputs.kv.clone()
    backend = make(kv, inputs.num_heads, device)
    staging = device.staging(_STAGING_BYTES)
    staging.begin()
    backend.plan(inputs.shares, staging)
    staging.upload()
    outputs = [_run(backend, layer, inputs) for layer in range(len(WINDOWS))]
    return relative_error(torch.stack(outputs), inputs.exact), num_stored_wrong(kv, inputs)


@torch.inference_mode()
def check_graph(make: MakeBackend, inputs: Sequence[Inputs], device: Device) -> float | None:
    """The largest error of one recorded plan that is replayed for each of `inputs`, decode steps of equal size.

    None when this backend cannot be recorded. Raises `ValueError` for steps of different sizes.
    """
    shares = {len(each.shares) for each in inputs}
    if len(shares) != 1 or any(share.num_tokens != 1 for each in inputs for share in each.shares):
        raise ValueError("a graph is for decode steps of one size")
    kv, first = inputs[0].kv.clone(), inputs[0]
    backend = make(kv, first.num_heads, device)
    for_graph = getattr(backend, "for_graph", None)
    recordable = for_graph(shares.pop()) if for_graph is not None else None
    if recordable is None:
        return None
    staging, fused = device.staging(_STAGING_BYTES), first.fused.clone()

    def run() -> Tensor:
        queries = fused[:, :, : first.num_heads]
        keys, values = _key_values(fused, first.num_heads)
        outputs = [recordable.run(i, queries[i], keys[i], values[i]) for i in range(len(WINDOWS))]
        return torch.stack(outputs)

    def bring(step: Inputs) -> None:
        kv.copy_(step.kv)
        fused.copy_(step.fused)
        staging.begin()
        recordable.plan(step.shares, staging)
        staging.upload()

    bring(first)
    run()
    bring(first)
    graph, output = device.record(run)
    errors = []
    for step in (*inputs, *reversed(inputs)):
        bring(step)
        output.fill_(math.nan)
        graph.replay()
        errors.append(relative_error(output, step.exact))
    return max(errors, key=_or_infinite)


def worst(errors: dict[str, float]) -> str:
    """The case with the largest error; what is not a number is larger than any."""
    return max(errors, key=lambda case: _or_infinite(errors[case]))


def relative_error(output: Tensor, exact: Tensor) -> float:
    """The largest difference over the largest exact value; NaN when anything is not a number."""
    difference = (output.to(torch.float64) - exact).abs()
    return float(difference.max() / exact.abs().max()) if bool(difference.isfinite().all()) else math.nan


def num_stored_wrong(kv: Tensor, inputs: Inputs) -> int:
    """Values in the pool that are not as they must be. Behind a sequence's last token anything may stand."""
    size = inputs.kv.shape[4]
    free = torch.ones(kv.shape[0], size, dtype=torch.bool)
    for share in inputs.shares:
        for position in range(share.context_len, len(share.block_table) * size):
            free[share.block_table[position // size], position % size] = False
    compared = free.to(kv.device)[:, None, None, None, :, None]
    same = (kv == inputs.stored) | (kv.isnan() & inputs.stored.isnan())
    return int((~same & compared).sum())


@dataclass(frozen=True, slots=True)
class DecodeCase(AttentionCase):
    """A decode step of `size` sequences, with other contexts for each seed."""

    size: int
    seed: int

    def shares(self) -> list[Share]:
        """See `AttentionCase.shares`."""
        return [Share((37 * self.seed + 61 * index) % 290, 1) for index in range(self.size)]


def graph_inputs(group: int, size: int, device: torch.device) -> list[Inputs]:
    """Decode steps of `size` sequences with other contexts each, over pools of equal size."""
    cases = [DecodeCase(group, 16, "decode", size, seed) for seed in range(3)]
    inputs = [make_inputs(case, "bfloat16", 128, device, 7 + case.seed) for case in cases]
    num_blocks = max(each.kv.shape[0] for each in inputs)
    return [_grown(each, num_blocks) for each in inputs]


def _or_infinite(error: float) -> float:
    return math.inf if math.isnan(error) else error


def _run(backend: AttentionBackend, layer: int, inputs: Inputs) -> Tensor:
    fused = inputs.fused[layer]
    keys, values = _key_values(fused, inputs.num_heads)
    return backend.run(layer, fused[:, : inputs.num_heads], keys, values)


def _key_values(fused: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    """Keys and values as a decoder hands them over: views of the fused projection [..., Hq + 2 Hkv, D]."""
    keys = fused[..., num_heads : num_heads + NUM_KV_HEADS, :]
    return keys, fused[..., num_heads + NUM_KV_HEADS :, :]


def _tables(planned: Sequence[Share], size: int, chance: torch.Generator) -> list[list[int]]:
    """Block tables out of order, sharing the blocks that sequences share."""
    counts = [-(-(share.start + share.num_tokens) // size) for share in planned]
    free = torch.randperm(sum(counts) + _SPARE_BLOCKS, generator=chance).tolist()
    tables: list[list[int]] = []
    donor: list[int] = []
    for share, count in zip(planned, counts, strict=True):
        shared = donor[: share.num_shared // size]
        table = [*shared, *(free.pop() for _ in range(count - len(shared)))]
        tables.append(table)
        donor = donor if share.num_shared else table
    return tables


def _places(table: Sequence[int], start: int, stop: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(block, slot) of tokens start .. stop - 1."""
    positions = torch.arange(start, stop)
    blocks = torch.tensor(table)[positions // size]
    return blocks.to(device), (positions % size).to(device)


def _exact(queries: Tensor, kv: Tensor, shares: Sequence[SequenceShare], window: int | None) -> Tensor:
    """[T, Hq, D] float64 of queries [T, Hq, D] over one layer [B, 2, Hkv, block_size, D]."""
    outputs, first, size = [], 0, kv.shape[3]
    for share in shares:
        q = queries[first : first + share.num_tokens].double()
        first += share.num_tokens
        blocks, slots = _places(share.block_table, 0, share.context_len, size, kv.device)
        keys, values = kv[blocks, :, :, slots].double().repeat_interleave(q.shape[1] // kv.shape[2], dim=2).unbind(1)
        scores = torch.einsum("thd,shd->hts", q, keys) / math.sqrt(q.shape[-1])
        at = torch.arange(share.start, share.context_len, device=kv.device)[:, None]
        seen = torch.arange(share.context_len, device=kv.device)
        hidden = (seen > at) | (seen <= at - window) if window is not None else seen > at
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        outputs.append(torch.einsum("hts,shd->thd", weights, values))
    return torch.cat(outputs)


def _grown(inputs: Inputs, num_blocks: int) -> Inputs:
    def grow(kv: Tensor) -> Tensor:
        more = kv.new_full((num_blocks - kv.shape[0], *kv.shape[1:]), math.nan)
        return torch.cat((kv, more))

    return replace(inputs, kv=grow(inputs.kv), stored=grow(inputs.stored))
