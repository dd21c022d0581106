"""What adapters add to the products of one decoder, and to which rows of a step.

Owns the table of products that may have adapters, by the names of their matrices in the checkpoint, and the rows of the
step that a pass is over. How the matrices of a fused product lie is the linear's own knowledge, and what is published
is `loading`'s.

Invariants: adapters are added before the first step. A product that is not in the table has none, so whoever loads an
adapter knows at once what cannot be applied. Rows of no adapter are not touched.

Letters: R rank, T tokens of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from torch import Tensor

AdaptedRows: TypeAlias = Sequence[tuple[bytes, slice | Tensor]]
"""Of each adapter in a step, by its digest, the rows of its tokens among the T: a slice, or [n] int64. No row twice."""


class LowRank(NamedTuple):
    """A change of one matrix W [out, in]: W + b a. a: [R, in]; b: [out, R], scaled."""

    a: Tensor
    b: Tensor


class Adaptable(Protocol):
    """A product of one or several matrices."""

    def adapt(self, digest: bytes, changes: Mapping[str, LowRank]) -> None:
        """From now on compute the rows of the adapter `digest` with these changes, by the names of matrices."""
        ...


@dataclass(frozen=True, slots=True)
class AdaptedMatrix:
    """A matrix [num_out, num_in] that adapters may change, and the product that it is in."""

    product: Adaptable
    num_out: int
    num_in: int


class Adapters:
    """Those of one decoder. `matrices`: what adapters may change, by the names of matrices. `rows`: of the pass that is
    computed; none, but in a pass that was given some. `num_bytes`: what all adapters take."""

    def __init__(self) -> None:
        self.matrices: dict[str, AdaptedMatrix] = {}
        self.rows: AdaptedRows = ()
        self.num_bytes = 0

    def offer(self, product: Adaptable, shapes: Mapping[str, tuple[int, int]]) -> None:
        """Adapters may change the matrices of `product`, which have these shapes [out, in]."""
        self.matrices |= {name: AdaptedMatrix(product, *shape) for name, shape in shapes.items()}

    def add(self, digest: bytes, changes: Mapping[str, LowRank]) -> None:
        """Add an adapter that changes matrices of these names, all of which there are."""
        of_products: dict[int, dict[str, LowRank]] = {}
        for name, change in changes.items():
            of_products.setdefault(id(self.matrices[name].product), {})[name] = change
            self.num_bytes += change.a.nbytes + change.b.nbytes
        for together in of_products.values():
            self.matrices[next(iter(together))].product.adapt(digest, together)
