"""A matrix product with a weight that is loaded: plain or fused of several matrices, whole or one rank's share.

Owns which rows and columns of which matrices lie where in the weight. How the weight lies in memory is its format
(`engine.models.linear_weights`), and which format and which kernel a device multiplies with is `DecoderOps`. A format
that checkpoints are published in takes the place of `PlainWeight` in `_plain`; an adapter adds to what `__call__`
returns.

Letters: T tokens of the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from engine.models.linear_weights import LinearWeight, PlainWeight
from engine.models.ops.base import DecoderOps
from engine.models.parameters import Parameter, Source
from engine.models.parts.base import PartSetup


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix of the checkpoint with `num_rows` outputs, of which this rank has `rows`; `name` without its ending."""

    name: str
    num_rows: int
    rows: range


class Linear:
    """x W^T + b. See `Part`."""

    def __init__(self, weight: LinearWeight, bias: Parameter | None, ops: DecoderOps) -> None:
        self._weight = weight
        self._bias = bias
        # a bias without elements belongs to another rank
        self._added = None if bias is None or bias.tensor.numel() == 0 else bias.tensor
        self._ops = ops

    @classmethod
    def column_parallel(
        cls, name: str, matrices: Sequence[Matrix], num_in: int, has_bias: bool, setup: PartSetup
    ) -> Linear:
        """The outputs of all `matrices` side by side, each rank's share of them."""
        weight = _plain(name, matrices, num_in, range(num_in), setup)
        bias = _bias(name, matrices, setup) if has_bias else None
        return cls(weight, bias, setup.ops)

    @classmethod
    def row_parallel(
        cls, name: str, matrix: str, num_out: int, num_in: int, columns: range, has_bias: bool, setup: PartSetup
    ) -> Linear:
        """All outputs from this rank's share of the inputs: the ranks' results are still to be added up, which is why
        only the first of them has the bias."""
        weight = _plain(name, [Matrix(matrix, num_out, range(num_out))], num_in, columns, setup)
        rows = range(num_out) if setup.shard.rank == 0 else range(0)
        bias = _bias(name, [Matrix(matrix, num_out, rows)], setup) if has_bias else None
        return cls(weight, bias, setup.ops)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, out] of x [T, in]."""
        return self._ops.linear(x, self._weight, self._added)

    def parameters(self) -> Iterator[Parameter]:
        """See `Part.parameters`."""
        yield from self._weight.parameters()
        if self._bias is not None:
            yield self._bias

    def pack(self) -> None:
        """See `Part.pack`."""
        if isinstance(self._weight, PlainWeight):
            self._weight = self._ops.pack(self._weight)


def _plain(name: str, matrices: Sequence[Matrix], num_in: int, columns: range, setup: PartSetup) -> PlainWeight:
    """The rows of all matrices, one below the other."""
    tensor = setup.empty(sum(len(matrix.rows) for matrix in matrices), len(columns))
    sources = tuple(
        Source(
            f"{matrix.name}.weight", (matrix.num_rows, num_in), (matrix.rows, columns), (region, range(len(columns)))
        )
        for matrix, region in zip(matrices, _regions(matrices), strict=True)
    )
    return PlainWeight(tensor, (Parameter(f"{name}.weight", tensor, sources),))


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
