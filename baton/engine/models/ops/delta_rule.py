"""The recurrence of a gated delta net in torch: how the matrices of heads are carried on over the tokens of a step.

Owns the arithmetic, and which pieces of a step are computed together. Tokens of a piece are: what each of them corrects
depends on those before it, which is a triangular system of equations.

Letters: T tokens of the step, B blocks, Hv value heads, Dk and Dv sizes of keys and values, n tokens of a piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from baton.engine.attention.base import StatePiece


class DeltaHeads(NamedTuple):
    """What the tokens of a step do to the matrices, float32: see `carry_on`. q, k: [T, Hv, Dk]; v: [T, Hv, Dv]; beta,
    fading: [T, Hv]."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    fading: Tensor


def carry_on_pieces(matrices: Tensor, pieces: Sequence[StatePiece], heads: DeltaHeads) -> Tensor:
    """What the tokens read, [T, Hv, Dv]; `matrices` [B, Hv, Dk, Dv] are brought up to date."""
    out = torch.zeros_like(heads.v)
    for together in _computed_together(pieces):
        tokens = torch.tensor([range(piece.first, piece.last) for piece in together], device=out.device)
        # [pieces, Hv, n, ...]
        of_pieces = [part[tokens].transpose(1, 2) for part in heads]
        found, after = carry_on(_before(matrices, together), *of_pieces)
        out[tokens] = found.transpose(1, 2)
        matrices[torch.tensor([piece.block for piece in together], device=out.device)] = after
    return out


def carry_on(before: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, fading: Tensor) -> tuple[Tensor, Tensor]:
    """Carry the matrices of heads on over n tokens. Returns what the tokens read, [..., n, Dv], and the matrices [...,
    Dk, Dv] behind them.

    A token multiplies the matrix by e to its `fading` [..., n]. It then adds the outer product of its key and of its
    value minus what that key reads, times `beta` [..., n]. At last it reads by its query. q, k: [..., n, Dk]; v: [...,
    n, Dv]; before: [..., Dk, Dv].
    """
    faded = fading.cumsum(dim=-1)
    # how much of what a token has added is left at another one, which comes later
    left = (faded[..., :, None] - faded[..., None, :]).exp().tril()
    from_begin = faded.exp()[..., None]
    among = (k @ k.mT * left).tril(-1) * beta[..., None]
    wanted = beta[..., None] * (v - from_begin * (k @ before))
    added = torch.linalg.solve_triangular(among, wanted, upper=False, unitriangular=True)
    read = from_begin * (q @ before) + (q @ k.mT * left) @ added
    last = faded[..., -1:]
    after = before * last.exp()[..., None] + (k * (last - faded).exp()[..., None]).mT @ added
    return read, after


def _computed_together(pieces: Sequence[StatePiece]) -> Iterator[Sequence[StatePiece]]:
    """Pieces of which none needs another: of each level those of a single token, and the others one by one."""
    by_level = attrgetter("level")
    for _, of_level in groupby(sorted(pieces, key=by_level), by_level):
        here = list(of_level)
        single = [piece for piece in here if piece.last - piece.first == 1]
        if single:
            yield single
        yield from ([piece] for piece in here if piece.last - piece.first > 1)


def _before(matrices: Tensor, pieces: Sequence[StatePiece]) -> Tensor:
    """The matrices before each piece, zeros at the begin of a sequence."""
    before = matrices[torch.tensor([piece.before or 0 for piece in pieces], device=matrices.device)]
    is_first = torch.tensor([piece.before is None for piece in pieces], device=matrices.device)
    # by a choice and not by a product: what an unused block holds may be NaN
    return before.masked_fill_(is_first[:, None, None, None], 0.0)
