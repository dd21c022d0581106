"""Loads the compiled kernels, and opens pools of threads that run them.

Owns the one place where a shared library is found and its functions get their types. What cannot be loaded is said in
one log line; torch computes then.

Invariant: the library that is loaded speaks the interface of `src/kernels.h` that this package was written for.
"""

from __future__ import annotations

import logging
import mmap
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import CDLL, POINTER, Array, Structure, byref, c_char_p, c_int32, c_int64, c_void_p, sizeof
from dataclasses import dataclass, field
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from baton.engine.native import arguments
from baton.engine.native.arguments import (
    DTYPES,
    BatonCall,
    BatonGuest,
    BatonPlan,
    BatonQuantizedPack,
    BatonStep,
)
from baton.engine.native.expert_arguments import BatonExperts, BatonRouting
from baton.engine.native.loans import CoreLoans, Lending
from baton.wire.errors import InvalidSetting

AUTO, TORCH = "auto", "torch"
_INTERFACE = 10
_NAME = "_kernels"
_HUGE_PAGE_BYTES = 1 << 21
_SHARED_BYTES = 1 << 24
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CallNotes:
    """Calls in their order, each with a copy of its arguments, and the tensors that were made for their results.

    `between`: what is done to such a tensor between two calls, and how many calls there were before.
    """

    calls: list[Structure] = field(default_factory=list)
    buffers: list[Tensor] = field(default_factory=list)
    between: list[tuple[int, Tensor, Callable[[Tensor], object]]] = field(default_factory=list)


class Kernels:
    """One pool of threads, and the kernels of one dispatch level on it. One call at a time: it belongs to one engine.

    Every call returns when its results are there. `arguments` may be used again afterwards.
    """

    def __init__(self, library: CDLL, num_threads: int, level: str, loans: CoreLoans | None = None) -> None:
        """`loans`: of the cores on which it has further threads. Raises `OSError` when the threads cannot be
        started."""
        guests = [] if loans is None else [BatonGuest(*each) for each in loans.guests]
        pool = library.baton_pool_open(num_threads, level.encode(), (BatonGuest * len(guests))(*guests), len(guests))
        if not pool:
            raise OSError(f"{num_threads} threads for the {level} kernels could not be started")
        self.level = level
        self.loans = loans
        self._library = library
        self._pool = c_void_p(pool)
        self._close = weakref.finalize(self, library.baton_pool_close, self._pool)
        self._noting: list[CallNotes] = []  # at most one
        self.pack = self._call("pack", arguments.BatonPack)
        self.linear = self._call("linear", arguments.BatonLinear)
        self.store = self._call("store", arguments.BatonStore)
        self.attention = self._call("attention", arguments.BatonAttention)
        self.add_norm = self._call("add_norm", arguments.BatonAddNorm)
        self.norm_rotate = self._call("norm_rotate", arguments.BatonNormRotate)
        self.gate = self._call("gate", arguments.BatonGate)
        self.gather = self._call("gather", arguments.BatonGather)
        self.argmax = self._call("argmax", arguments.BatonArgmax)
        self.sample = self._call("sample", arguments.BatonSample)
        self.quantized_pack = self._call("quantized_pack", BatonQuantizedPack)
        self.quantized_linear = self._call("quantized_linear", arguments.BatonQuantizedLinear)
        self.delta_rule = self._call("delta_rule", arguments.BatonDeltaRule)
        self.quantize = self._call("quantize", arguments.BatonQuantize)
        self.route = self._call("route", BatonRouting)
        self.experts = self._call("experts", BatonExperts)
        self.round_rows = self._call("round_rows", arguments.BatonRoundRows)
        self.rounded_pack = self._call("rounded_pack", BatonQuantizedPack)
        self.rounded_linear = self._call("rounded_linear", arguments.BatonRoundedLinear)

    def packed_bytes(self, dtype: torch.dtype, num_out: int, num_in: int) -> int:
        """The bytes of a packed weight [num_out, num_in]; 0 where there is no product for `dtype`."""
        if dtype not in DTYPES:
            return 0
        return int(self._library.baton_packed_bytes(self._pool, DTYPES[dtype], num_out, num_in))

    def quantized_bytes(self, given: BatonQuantizedPack) -> int:
        """The bytes that `given` packs into, whose pointers need not be set but for NULL or not of the offsets."""
        return int(self._library.baton_quantized_bytes(self._pool, byref(given)))

    def expert_scratch(self, given: BatonExperts, num_chosen: int, *, rounds: bool) -> int:
        """The bytes of scratch that `given` needs for each token. `rounds`: a product takes rounded rows."""
        return int(self._library.baton_expert_scratch(given.dtype, given.size, given.inner, num_chosen, rounds))

    def rounded_bytes(self, size: int) -> int:
        """The bytes of a row of so many inputs that is rounded to 8 bits."""
        return int(self._library.baton_rounded_bytes(self._pool, size))

    def rounded_pack_bytes(self, given: BatonQuantizedPack) -> int:
        """As `quantized_bytes`, for products with rounded rows; 0 where there are none."""
        return int(self._library.baton_rounded_pack_bytes(self._pool, byref(given)))

    def attention_scratch(self, max_sequences: int, head_dim: int) -> int:
        """The bytes of scratch that attention over a step of so many sequences needs at most."""
        return int(self._library.baton_attention_scratch(self._pool, max_sequences, head_dim))

    def plan(self, plan: BatonPlan) -> int:
        """Write the index arrays of a step; one of `BatonPlanned`."""
        planned: int = self._library.baton_plan(byref(plan))
        return planned

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory for the result of a call. Tensors that calls hand on to each other must come from here."""
        tensor = torch.empty(shape, dtype=dtype)
        for notes in self._noting:
            notes.buffers.append(tensor)
        return tensor

    def do_between(self, act: Callable[[Tensor], object], tensor: Tensor) -> None:
        """Call `act`, which changes `tensor` in place and is no kernel. A recording is cut there, and calls it too."""
        act(tensor)
        for notes in self._noting:
            notes.between.append((len(notes.calls), tensor, act))

    @contextmanager
    def noting(self) -> Iterator[CallNotes]:
        """Note the calls that are made, and the tensors that `empty` returns."""
        self._noting.append(CallNotes())
        try:
            yield self._noting[-1]
        finally:
            self._noting.pop()

    def replay(self, calls: Array[BatonCall], part: range, step: BatonStep, num_rows: int) -> None:
        """Make those of `calls` that are in `part`. See kernels.h."""
        first = byref(calls, part.start * sizeof(BatonCall))
        self._library.baton_replay(self._pool, first, len(part), byref(step), num_rows)

    def close(self) -> None:
        """End the threads. No call afterwards."""
        self._close()

    def _call(self, name: str, structure: type[Structure]) -> Callable[[Structure], None]:
        function: Any = getattr(self._library, f"baton_{name}")
        function.argtypes, function.restype = (c_void_p, POINTER(structure)), None
        pool, noting = self._pool, self._noting

        def call(given: Structure) -> None:
            function(pool, byref(given))
            for notes in noting:
                notes.calls.append(structure.from_buffer_copy(given))

        return call


def load_library(path: Path | None = None) -> CDLL:
    """The compiled kernels, from the package's own folder unless `path` is given. Raises `OSError`."""
    library = CDLL(str(path or _installed()))
    found = library.baton_interface()
    if found != _INTERFACE:
        raise OSError(f"the compiled kernels have interface {found}, not {_INTERFACE}: install Baton again")
    library.baton_levels.restype = c_char_p
    library.baton_pool_open.argtypes = (c_int32, c_char_p, POINTER(BatonGuest), c_int32)
    library.baton_pool_open.restype = c_void_p
    library.baton_loan_give.argtypes, library.baton_loan_give.restype = (c_void_p, c_int64), None
    library.baton_loan_take_back.argtypes, library.baton_loan_take_back.restype = (c_void_p,), None
    library.baton_loan_computing_ns.argtypes, library.baton_loan_computing_ns.restype = (c_void_p,), c_int64
    library.baton_pool_close.argtypes, library.baton_pool_close.restype = (c_void_p,), None
    library.baton_packed_bytes.argtypes = (c_void_p, c_int32, c_int64, c_int64)
    library.baton_packed_bytes.restype = c_int64
    library.baton_quantized_bytes.argtypes = (c_void_p, POINTER(BatonQuantizedPack))
    library.baton_quantized_bytes.restype = c_int64
    library.baton_expert_scratch.argtypes = (c_int32, c_int64, c_int64, c_int64, c_int32)
    library.baton_expert_scratch.restype = c_int64
    library.baton_rounded_bytes.argtypes, library.baton_rounded_bytes.restype = (c_void_p, c_int64), c_int64
    library.baton_rounded_pack_bytes.argtypes = (c_void_p, POINTER(BatonQuantizedPack))
    library.baton_rounded_pack_bytes.restype = c_int64
    library.baton_attention_scratch.argtypes = (c_void_p, c_int64, c_int32)
    library.baton_attention_scratch.restype = c_int64
    library.baton_plan.argtypes, library.baton_plan.restype = (POINTER(BatonPlan),), c_int32
    library.baton_replay.argtypes = (c_void_p, c_void_p, c_int64, POINTER(BatonStep), c_int64)
    library.baton_replay.restype = None
    return library


def levels(library: CDLL) -> list[str]:
    """The dispatch levels that this processor can run, best first."""
    names: bytes = library.baton_levels()
    return names.decode().split(",")


def open_kernels(
    setting: str, num_threads: int, load: Callable[[], CDLL] = load_library, lending: Lending | None = None
) -> Kernels | None:
    """The kernels that `--cpu-kernels` asks for, None for torch's. With `lending` they use cores of other nodes too.

    `auto`: the best level of this processor, or torch with one log line that says why. Raises `InvalidSetting` for a
    level that is not here.
    """
    if setting == TORCH:
        return None
    try:
        library = load()
        here = levels(library)
        if setting != AUTO and setting not in here:
            raise InvalidSetting(f"--cpu-kernels {setting!r:.50} is not one of {AUTO}, {TORCH}, {', '.join(here)}")
        loans = None if lending is None else _open_loans(library, lending)
        return Kernels(library, num_threads, here[0] if setting == AUTO else setting, loans)
    except OSError as error:
        if setting != AUTO:
            raise InvalidSetting(f"--cpu-kernels {setting!r:.50}: {error}") from None
        _log.warning("CPU kernels: torch's instead of Baton's own, which are faster: %s", error)
        return None


def _open_loans(library: CDLL, lending: Lending) -> CoreLoans | None:
    try:
        return CoreLoans(library, lending)
    except OSError as error:
        _log.warning("cores are not lent: %s", error)
        return None


def huge_pages(num_bytes: int) -> Tensor:
    """`num_bytes` of memory, uint8 and aligned to 64 bytes, on huge pages where the system gives them. A stream through
    a large weight is a fifth faster then. Raises `OSError` without memory.

    The memory is fresh from the system, and goes back to it when nobody holds it. In memory that was freed before,
    pages that are not needed would stay resident.
    """
    if num_bytes < _HUGE_PAGE_BYTES:
        small = torch.empty(num_bytes + 64, dtype=torch.uint8)
        return small[-small.data_ptr() % 64 :][:num_bytes]
    region = mmap.mmap(-1, num_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(region, dtype=torch.uint8)
    gap = -whole.data_ptr() % _HUGE_PAGE_BYTES
    if hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE, gap, num_bytes)
    return whole[gap : gap + num_bytes]


class WeightMemory:
    """Memory on huge pages for many weights: small ones share them, since a system bounds how many regions a process
    may have."""

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """Memory as of `huge_pages`. Weights may share pages, which are freed with the last weight in them."""
        if num_bytes >= _SHARED_BYTES // 2:
            return huge_pages(num_bytes)
        rounded = -(-num_bytes // 64) * 64
        if rounded > len(self._rest):
            self._rest = huge_pages(_SHARED_BYTES)
        taken, self._rest = self._rest[:num_bytes], self._rest[rounded:]
        return taken


def _installed() -> Path:
    folder = Path(__file__).parent
    for suffix in EXTENSION_SUFFIXES:
        if (path := folder / f"{_NAME}{suffix}").exists():
            return path
    raise OSError("they were not compiled when Baton was installed, since there was no C++ compiler")
