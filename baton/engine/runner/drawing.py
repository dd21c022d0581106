"""How a token is drawn from weights by the noise of its place. Both ways follow the weights exactly.

`INVERSE`: the place in the sum of all weights that the noise says. It costs one number.

`RACE`: each token has a time of its own, which the noise and its id say, and the first relative to its weight wins
(Gumbel's trick, with exponential times). Where another model draws by the same noise from weights that differ little,
it draws the same token nearly as often as any rule allows. By `INVERSE` it does so less often: a small difference moves
the places of all tokens behind it. So drafts are right more often, and drawing takes longer.

Letters: R rows of one pass, V vocabulary, K leading tokens of a row.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

_STEP, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
"""Of splitmix64, as signed numbers."""


class Drawing(Protocol):
    """Draws places in rows of weights, which need not add up to one. `is_native`: the CPU kernels draw so."""

    is_native: bool

    def of_all(self, weights: Tensor, noise: Tensor) -> Tensor:
        """[R, 1], of weights [R, V] float64, which it may change, and noise [R, 1]. One beyond the last where a row
        holds no numbers."""
        ...

    def of_first(self, weights: Tensor, cumulative: Tensor, last: Tensor, ids: Tensor, noise: Tensor) -> Tensor:
        """[R, 1], at most `last` [R, 1], of weights and their sums [R, K] and the ids [R, K] of their tokens."""
        ...


class Inverse:
    """The token at a place in the sum of all weights. See `Drawing`."""

    is_native = True

    def of_all(self, weights: Tensor, noise: Tensor) -> Tensor:
        """The place where the sum of weights exceeds that share of all."""
        cumulative = weights.cumsum_(-1)
        return torch.searchsorted(cumulative, noise * cumulative[:, -1:], right=True)

    def of_first(self, weights: Tensor, cumulative: Tensor, last: Tensor, ids: Tensor, noise: Tensor) -> Tensor:
        """The same among the first tokens."""
        place = torch.searchsorted(cumulative, noise * cumulative.gather(1, last), right=True)
        return torch.minimum(place, last)


class Race:
    """The token whose time, relative to its weight, is the least. See `Drawing`."""

    is_native = False

    def of_all(self, weights: Tensor, noise: Tensor) -> Tensor:
        """The winner among all tokens."""
        ids = torch.arange(weights.shape[1], device=weights.device)
        return weights.div_(exponentials(noise, ids)).argmax(-1, keepdim=True)

    def of_first(self, weights: Tensor, cumulative: Tensor, last: Tensor, ids: Tensor, noise: Tensor) -> Tensor:
        """The winner among the first tokens."""
        places = torch.arange(weights.shape[1], device=weights.device)
        times = weights.div(exponentials(noise, ids)).masked_fill_(places > last, -1.0)
        return times.argmax(-1, keepdim=True)


INVERSE: Drawing = Inverse()
RACE: Drawing = Race()


def exponentials(noise: Tensor, ids: Tensor) -> Tensor:
    """A number above 0 for each of `ids` [R, K] or [K], [R, K] float64: exponentially distributed, and a function of
    that id and of noise [R, 1] alone, on every device."""
    mixed = _mixed(_mixed(noise.contiguous().view(torch.int64)) + ids * _STEP)
    return _shifted(mixed, 11).to(torch.float64).add_(0.5).mul_(2.0**-53).log_().neg_()


def _mixed(bits: Tensor) -> Tensor:
    """64 bits that look independent for numbers [...] int64 that differ."""
    bits = (bits ^ _shifted(bits, 30)) * _FIRST
    bits = (bits ^ _shifted(bits, 27)) * _SECOND
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Tensor, count: int) -> Tensor:
    """Without the sign that a shift of signed numbers repeats."""
    return (bits >> count) & ((1 << (64 - count)) - 1)
