"""The header of a GGUF file: its facts, and where its tensors lie. Imports no torch.

Owns the format. Nothing in a file is trusted: each length is compared with what is left of the file before anything is
read or allocated for it.

Invariant: what cannot be right is a `ModelLoadError` that names the file.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, TypeAlias

from baton.wire.errors import ModelLoadError

Fact: TypeAlias = "int | float | bool | str | list[int] | list[float] | list[bool] | list[str]"

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_FACTS = _MAX_TENSORS = 1 << 16
_MAX_STRING_BYTES = 1 << 24
_MAX_LIST_ITEMS = 1 << 22
_MAX_DIMENSIONS = 4
_NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _LIST = 8, 9


@dataclass(frozen=True)
class TensorType:
    """How numbers lie in a file: `block_bytes` for each `block_size` of them."""

    name: str
    block_size: int
    block_bytes: int


TENSOR_TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    8: TensorType("Q8_0", 32, 34),
    12: TensorType("Q4_K", 256, 144),
    14: TensorType("Q6_K", 256, 210),
    30: TensorType("BF16", 1, 2),
}
"""By the numbers that the format gives them."""


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a file, which begins at `offset`. `shape`: the last dimension is contiguous."""

    type: TensorType
    shape: tuple[int, ...]
    offset: int

    @property
    def row_bytes(self) -> int:
        """The bytes of one row, along the last dimension."""
        return self.shape[-1] // self.type.block_size * self.type.block_bytes

    @property
    def num_bytes(self) -> int:
        """The bytes of the whole tensor."""
        return math.prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True)
class GgufFile:
    """`header_bytes`: what comes before the data of tensors."""

    path: Path
    facts: dict[str, Fact]
    tensors: dict[str, GgufTensor]
    header_bytes: int


def read_gguf(path: Path) -> GgufFile:
    """Read the header. Raises `ModelLoadError`."""
    try:
        with path.open("rb") as file:
            return _read(path, _Reader(file, path.stat().st_size))
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{path}: not a valid GGUF file: {error}") from error


def read_tensors(path: Path) -> GgufFile:
    """As `read_gguf`, but without its facts, among which are vocabularies. A file that has not changed is not read
    again. Raises `ModelLoadError`."""
    try:
        found = path.stat()
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from error
    return _tensors_of(path, found.st_size, found.st_mtime_ns)


@lru_cache(maxsize=1)
def _tensors_of(path: Path, num_bytes: int, mtime_ns: int) -> GgufFile:
    return replace(read_gguf(path), facts={})


class _Reader:
    """Reads a file from its beginning. Raises `ValueError` for what goes beyond its end."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._left = size
        self.place = 0

    def take(self, count: int) -> bytes:
        if count > self._left:
            raise ValueError(f"it ends within its header, at byte {self.place + self._left}")
        taken = self._file.read(count)
        self._left -= count
        self.place += count
        return taken

    def require(self, count: int, least_bytes: int, most: int, what: str) -> int:
        """`count`, which the file has room for if each is at least so many bytes."""
        if count > most or count * least_bytes > self._left:
            raise ValueError(f"{count} {what} at byte {self.place}")
        return count

    def number(self, kind: str) -> int:
        value: int = struct.unpack(kind, self.take(struct.calcsize(kind)))[0]
        return value

    def string(self) -> str:
        count = self.require(self.number("<Q"), 1, _MAX_STRING_BYTES, "bytes in a string")
        return self.take(count).decode(errors="replace")

    def fact(self) -> Fact:
        kind = self.number("<I")
        if kind != _LIST:
            return self._item(kind)()
        kind = self.number("<I")
        if kind not in _NUMBERS:
            count = self.require(self.number("<Q"), 8, _MAX_LIST_ITEMS, "strings in a list")
            read = self._item(kind)
            return [str(read()) for _ in range(count)]
        size = struct.calcsize(_NUMBERS[kind])
        count = self.require(self.number("<Q"), size, _MAX_LIST_ITEMS, "numbers in a list")
        return list(struct.unpack(f"<{count}{_NUMBERS[kind][1]}", self.take(count * size)))

    def _item(self, kind: int) -> Callable[[], int | float | bool | str]:
        if kind == _STRING:
            return self.string
        if kind not in _NUMBERS:
            raise ValueError(f"a value of the unknown type {kind} at byte {self.place}")
        return lambda: self.number(_NUMBERS[kind])


def _read(path: Path, reader: _Reader) -> GgufFile:
    if reader.take(4) != _MAGIC:
        raise ValueError("its first 4 bytes are not GGUF")
    version = reader.number("<I")
    if version not in _VERSIONS:
        raise ValueError(f"its version is {version}; known: {', '.join(map(str, _VERSIONS))}")
    num_tensors = reader.require(reader.number("<Q"), 24, _MAX_TENSORS, "tensors")
    num_facts = reader.require(reader.number("<Q"), 13, _MAX_FACTS, "facts")
    facts: dict[str, Fact] = {}
    for _ in range(num_facts):
        name = reader.string()
        if name in facts:
            raise ValueError(f"{name!r:.100} is there twice")
        facts[name] = reader.fact()
    found = [_tensor(reader) for _ in range(num_tensors)]
    if len({name for name, _ in found}) < num_tensors:
        raise ValueError("two tensors have the same name")
    alignment = facts.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 8 <= alignment <= 1 << 20:
        raise ValueError(f"general.alignment is {alignment!r:.100}")
    begin = -(-reader.place // alignment) * alignment
    size = path.stat().st_size
    tensors = {}
    for name, (tensor_type, shape, offset) in found:
        tensor = GgufTensor(tensor_type, shape, begin + offset)
        if tensor.offset + tensor.num_bytes > size:
            raise ValueError(f"truncated: {name!r:.100} ends at byte {tensor.offset + tensor.num_bytes} of {size}")
        tensors[name] = tensor
    return GgufFile(path, facts, tensors, reader.place)


def _tensor(reader: _Reader) -> tuple[str, tuple[TensorType, tuple[int, ...], int]]:
    name = reader.string()
    num_dimensions = reader.number("<I")
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise ValueError(f"{name!r:.100} has {num_dimensions} dimensions")
    shape = tuple(reader.number("<Q") for _ in range(num_dimensions))[::-1]
    if min(shape) < 1 or math.prod(shape) > 1 << 40:
        raise ValueError(f"{name!r:.100} has the shape {list(shape)}")
    number, offset = reader.number("<I"), reader.number("<Q")
    tensor_type = TENSOR_TYPES.get(number)
    if tensor_type is None:
        known = ", ".join(each.name for each in TENSOR_TYPES.values())
        raise ValueError(f"{name!r:.100} has the type {number}, which is not supported; supported: {known}")
    if shape[-1] % tensor_type.block_size:
        raise ValueError(f"{name!r:.100} has rows of {shape[-1]}, no multiple of the {tensor_type.name} block")
    return name, (tensor_type, shape, offset)
