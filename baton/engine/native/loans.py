"""Cores that the nodes of one machine lend each other while they compute nothing.

Owns the page in which each node has a line that says whether its cores are lent, and what a node is told of it
(`Lending`). Does not know who lends when (`baton.node.lent_cores`), nor how a guest takes tiles (`src/pool.h`).

Invariants: a node writes its own line and no other. A page of zeros lends nothing, and whatever stands there decides
about speed alone.
"""

from __future__ import annotations

import mmap
import os
from ctypes import CDLL, addressof, c_char
from dataclasses import dataclass

from baton.wire.errors import InvalidSetting

LINE_BYTES = 64
MAX_LINES = 256


@dataclass(frozen=True, slots=True)
class Lending:
    """The facts by which a node lends its cores and uses those of others.

    `descriptor`: of the page, inherited; `line`: this node's own. `rests_for`: lines of the nodes to which it lends its
    cores between its steps too. `guests`: cores of other nodes on which it has threads, each with that node's line.
    """

    descriptor: int
    line: int
    rests_for: tuple[int, ...]
    guests: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        """As the setting `--core-loans` has it."""
        rests_for = ",".join(map(str, self.rests_for))
        return f"{self.descriptor}:{self.line}:{rests_for}:{','.join(f'{core}@{line}' for core, line in self.guests)}"

    @classmethod
    def parse(cls, text: str) -> Lending | None:
        """The reverse; None for "". Raises `InvalidSetting`."""
        if not text:
            return None
        try:
            descriptor, line, rests_for, guests = text.split(":")
            pairs = (pair.split("@") for pair in guests.split(",") if pair)
            lending = cls(
                int(descriptor),
                int(line),
                tuple(int(each) for each in rests_for.split(",") if each),
                tuple((int(core), int(lender)) for core, lender in pairs),
            )
        except ValueError:
            raise InvalidSetting(f"--core-loans {text!r:.100} is not DESCRIPTOR:LINE:LINE,...:CORE@LINE,...") from None
        lines = (lending.line, *lending.rests_for, *(lender for _, lender in lending.guests))
        if not all(0 <= each < MAX_LINES for each in lines):
            raise InvalidSetting(f"--core-loans {text!r:.100} names a line that is none of {MAX_LINES}")
        return lending


class CoreLoans:
    """The page, mapped; it stays so as long as anybody has this object. `library`: the compiled kernels."""

    def __init__(self, library: CDLL, lending: Lending) -> None:
        """Raises `OSError` when the descriptor is no such page."""
        if os.fstat(lending.descriptor).st_size < LINE_BYTES * MAX_LINES:
            raise OSError(f"descriptor {lending.descriptor} is no page of loans")
        self._library = library
        self._lending = lending
        self._memory = mmap.mmap(lending.descriptor, LINE_BYTES * MAX_LINES)
        self._address = addressof(c_char.from_buffer(self._memory))
        self._own = self._line(lending.line)
        self.take_back()  # what a process before this one has lent

    @property
    def guests(self) -> list[tuple[int, int, int]]:
        """The fields of a `BatonGuest` for each."""
        return [(self._line(line), self._own, core) for core, line in self._lending.guests]

    def give(self, for_s: float = -1.0) -> None:
        """Lend this node's cores for `for_s` seconds. Below zero: until they are taken back."""
        self._library.baton_loan_give(self._own, int(for_s * 1e9))

    def take_back(self) -> None:
        """Lend no cores any more. To be called again and again while the node computes."""
        self._library.baton_loan_take_back(self._own)

    def is_wanted(self, within_s: float) -> bool:
        """Whether a node that has guests here has said within so long that it computes, and they do not stay away."""
        ages = (self._library.baton_loan_computing_ns(self._line(line)) for line in self._lending.rests_for)
        return any(0 <= age < within_s * 1e9 for age in ages)

    def _line(self, number: int) -> int:
        return self._address + number * LINE_BYTES


def open_page() -> int:
    """A descriptor of a new page, that children may inherit; the caller closes it. Raises `OSError`."""
    if "memfd_create" not in dir(os):
        raise OSError("this system has no anonymous files")
    descriptor = os.memfd_create("baton-core-loans", 0)
    os.ftruncate(descriptor, LINE_BYTES * MAX_LINES)
    return descriptor
