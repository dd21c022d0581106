"""A matrix product with a weight that is loaded: plain or fused of several matrices, whole or one rank's share.

Owns which rows and columns of which matrices lie where in the weight. How the weight lies in memory is its format
(`baton.engine.models.linear_weights`), and which format and which kernel a device multiplies with is `DecoderOps`.
Matrices that a checkpoint has quantized are loaded one by one as its method says; plain ones fill one weight. An
adapter adds to what `__call__` returns, in the rows of its tokens.

Letters: T tokens of the step, R rank of an adapter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.models.adapters.low_rank import LowRank
from baton.engine.models.collectives import Collectives
from baton.engine.models.linear_weights import LinearWeight, LoadedWeight, PlainWeight, StackedWeight
from baton.engine.models.parameters import Parameter, Source, slices
from baton.engine.models.parts.base import PartSetup
from baton.engine.models.quantization.base import Piece, Unread, joined, reordered


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix of the checkpoint with `num_rows` outputs, of which this rank has `rows`; `name` without its ending."""

    name: str
    num_rows: int
    rows: range


class Linear:
    """x W^T + b. See `Part`."""

    def __init__(
        self, unread: Sequence[Unread], bias: Parameter | None, setup: PartSetup, row_order: Tensor | None = None
    ) -> None:
        """`unread`: weights one below the other. `row_order` [out]: of the rows after loading; None: they stay as they
        are."""
        self._unread = unread
        # plain weights compute before they are packed, too
        first = unread[0]
        self._weight: LinearWeight | None = first if len(unread) == 1 and isinstance(first, PlainWeight) else None
        self._row_order = row_order
        self._bias = bias
        # a bias without elements belongs to another rank
        self._added = None if bias is None or bias.tensor.numel() == 0 else bias.tensor
        self._ops = setup.ops
        self._quantization = setup.quantization
        self._adapters = setup.adapters
        self._matrices: Sequence[Matrix] = ()
        self._changes: dict[bytes, tuple[LinearWeight, LinearWeight]] = {}

    @classmethod
    def column_parallel(
        cls,
        name: str,
        matrices: Sequence[Matrix],
        num_in: int,
        has_bias: bool,
        setup: PartSetup,
        *,
        is_transposed: bool = False,
        row_order: Tensor | None = None,
    ) -> Linear:
        """The outputs of all `matrices` side by side, each rank's share of them. `is_transposed`: they are published
        [in, out]. `row_order`: see `__init__`."""
        unread = unread_weight(name, matrices, num_in, range(num_in), setup, is_transposed=is_transposed)
        bias = _bias(name, matrices, setup) if has_bias else None
        linear = cls(unread, bias, setup, row_order)
        linear._offer(matrices, num_in)
        return linear

    @classmethod
    def row_parallel(
        cls,
        name: str,
        matrix: str,
        num_out: int,
        num_in: int,
        columns: range,
        has_bias: bool,
        setup: PartSetup,
        *,
        is_transposed: bool = False,
    ) -> Linear:
        """All outputs from this rank's share of the inputs: the ranks' results are added up, by the setup's collectives
        or by the caller, which is why only the first of them has the bias. `is_transposed`: as in `column_parallel`."""
        all_rows = [Matrix(matrix, num_out, range(num_out))]
        unread = unread_weight(name, all_rows, num_in, columns, setup, is_transposed=is_transposed)
        rows = range(num_out) if setup.shard.rank == 0 else range(0)
        bias = _bias(name, [Matrix(matrix, num_out, rows)], setup) if has_bias else None
        if setup.collectives is not None:
            return SummedLinear(unread, bias, setup, setup.collectives)
        linear = cls(unread, bias, setup)
        linear._offer(all_rows, num_in)
        return linear

    def __call__(self, x: Tensor) -> Tensor:
        """[T, out] of x [T, in]."""
        out = self._ops.linear(x, self.weight, self._added)
        if self._changes:
            self._add_changes(out, x)
        return out

    def adapt(self, digest: bytes, changes: Mapping[str, LowRank]) -> None:
        """Take the low-rank changes of the adapters for these matrices. A fused product has all ranks beside each
        other, and zeros where a rank is another matrix's. After `pack`."""
        a = torch.cat([change.a for change in changes.values()])
        b = torch.cat([self._spread(name, change.b) for name, change in changes.items()], dim=1)
        if self._row_order is not None:
            b = b[self._row_order.to(b.device)]
        self._changes[digest] = (self._ops.pack(PlainWeight(a)), self._ops.pack(PlainWeight(b)))

    def _spread(self, name: str, b: Tensor) -> Tensor:
        """The rows of `b` [num_out, R] where those of the matrix `name` lie, [out, R]; zeros in the other rows."""
        regions = _regions(self._matrices)
        spread = b.new_zeros(regions[-1].stop, b.shape[1])
        for matrix, region in zip(self._matrices, regions, strict=True):
            if matrix.name == name:
                spread[slices((region,))] = b[slices((matrix.rows,))]
        return spread

    def _offer(self, matrices: Sequence[Matrix], num_in: int) -> None:
        self._matrices = matrices
        self._adapters.offer(self, {matrix.name: (matrix.num_rows, num_in) for matrix in matrices})

    def _add_changes(self, out: Tensor, x: Tensor) -> None:
        """Add to `out` [T, out], in the rows of each adapter, x A^T B^T."""
        for digest, rows in self._adapters.rows:
            if (change := self._changes.get(digest)) is not None:
                a, b = change
                out[rows] += self._ops.linear(self._ops.linear(x[rows], a, None), b, None)

    @property
    def weight(self) -> LinearWeight:
        """What it multiplies by: of several pieces, or of one that is not plain, only once they are packed."""
        assert self._weight is not None
        return self._weight

    def parameters(self) -> Iterator[Parameter]:
        """What loading fills: the weight, and the bias if there is one."""
        for unread in self._unread:
            yield from unread.parameters()
        if self._bias is not None:
            yield self._bias

    def pack(self) -> None:
        """Bring the weight into the layout of these operations."""
        loaded: list[LoadedWeight] = [unread.loaded() for unread in self._unread]
        self._unread = ()
        if self._row_order is not None:
            loaded = reordered(loaded, self._row_order)
            if self._added is not None:
                self._added = self._added[self._row_order.to(self._added.device)]
        pieces = tuple(self._ops.pack(self._quantization.quantized(weight)) for weight in joined(loaded))
        self._weight = pieces[0] if len(pieces) == 1 else StackedWeight(pieces)


def unread_weight(
    name: str, matrices: Sequence[Matrix], num_in: int, columns: range, setup: PartSetup, *, is_transposed: bool = False
) -> Sequence[Unread]:
    """The weight of all matrices, in one where all of them are plain."""
    found: list[Unread] = []
    for number, matrix in enumerate(matrices):
        shape = (matrix.num_rows, num_in)
        piece_name = f"{name}.weight" if len(matrices) == 1 else f"{name}.weight.{number}"
        piece = Piece(piece_name, matrix.name, shape, matrix.rows, columns, setup.dtype, setup.device)
        quantized = setup.quantization.unread(piece)
        found.append(quantized or _plain(piece_name, [matrix], num_in, columns, setup, is_transposed=is_transposed))
    if all(isinstance(unread, PlainWeight) for unread in found):
        return [_plain(f"{name}.weight", matrices, num_in, columns, setup, is_transposed=is_transposed)]
    return found


class SummedLinear(Linear):
    """The sum of x W^T + b over all ranks, each with its share of the inputs. See `Part`."""

    def __init__(
        self, unread: Sequence[Unread], bias: Parameter | None, setup: PartSetup, collectives: Collectives
    ) -> None:
        super().__init__(unread, bias, setup)
        self._collectives = collectives

    def __call__(self, x: Tensor) -> Tensor:
        """[T, out] of this rank's x [T, in]."""
        return self._collectives.add_up(super().__call__(x))


def _plain(
    name: str, matrices: Sequence[Matrix], num_in: int, columns: range, setup: PartSetup, *, is_transposed: bool
) -> PlainWeight:
    """The rows of all matrices, one below the other."""
    num_out = sum(len(matrix.rows) for matrix in matrices)
    tensor = setup.empty(num_out, len(columns))
    held = setup.quantization.held_bytes(num_out, len(columns))
    sources = tuple(
        Source(
            f"{matrix.name}.weight",
            (num_in, matrix.num_rows) if is_transposed else (matrix.num_rows, num_in),
            (columns, matrix.rows) if is_transposed else (matrix.rows, columns),
            (region, range(len(columns))),
            is_transposed,
        )
        for matrix, region in zip(matrices, _regions(matrices), strict=True)
    )
    return PlainWeight(tensor, (Parameter(name, tensor, sources, held_bytes=held),))


def _bias(name: str, matrices: Sequence[Matrix], setup: PartSetup) -> Parameter:
    tensor = setup.empty(sum(len(matrix.rows) for matrix in matrices))
    sources = tuple(
        Source(f"{matrix.name}.bias", (matrix.num_rows,), (matrix.rows,), (region,))
        for matrix, region in zip(matrices, _regions(matrices), strict=True)
    )
    return Parameter(f"{name}.bias", tensor, sources)


def _regions(matrices: Sequence[Matrix]) -> list[range]:
    """The rows of each matrix within the fused weight."""
    regions: list[range] = []
    for matrix in matrices:
        first = regions[-1].stop if regions else 0
        regions.append(range(first, first + len(matrix.rows)))
    return regions
