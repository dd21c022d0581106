"""What the machine's own rates allow: the least time of a decode step and of a prompt, and how long a device was busy.

Owns the arithmetic between counted bytes or operations (`bench.limits.model_shapes`) and measured rates. Pure: no
tensors, no clock. Times are milliseconds, rates GB/s and TFLOP/s, where G is 1e9 and T is 1e12.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bench.limits.model_shapes import ModelShapes, Product


def decode_floor_ms(shapes: ModelShapes, context_lens: Sequence[int], gb_per_s: float) -> float:
    """(W + sum of context * KV bytes of a token) / bandwidth: every weight and every visible key and value once."""
    return shapes.decode_bytes(list(context_lens)) / gb_per_s / 1e6


def prefill_floor_ms(shapes: ModelShapes, num_tokens: int, tflop_per_s: float) -> float:
    """Operations of a prompt over the rate of the model's own products."""
    return shapes.prefill_flop(num_tokens) / tflop_per_s / 1e9


def weighted_tflop_per_s(products: Sequence[Product], taken_ms: Sequence[float]) -> float:
    """The rate over all products of a model, where one of each was timed: operations over time, layer for layer.

    Raises `ValueError` when a time is missing.
    """
    total_ms = sum(product.count * ms for product, ms in zip(products, taken_ms, strict=True))
    return sum(product.flop for product in products) / total_ms / 1e9


def gb_per_s(num_bytes: int, taken_ms: float) -> float:
    """A rate of bytes."""
    return num_bytes / taken_ms / 1e6


def busy_us(intervals: Iterable[tuple[float, float]]) -> float:
    """How long a device was busy: the union of (begin, end) in microseconds, whatever overlaps."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        if end > until:
            total += end - max(begin, until)
            until = end
    return total


def prefix_share(mine: Sequence[int], reference: Sequence[int]) -> float:
    """Which share of `reference` goes by before the first token that differs."""
    same = 0
    for ours, theirs in zip(mine, reference, strict=False):
        if ours != theirs:
            break
        same += 1
    return same / len(reference)
