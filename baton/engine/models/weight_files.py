"""The safetensors files of a checkpoint: their list, their headers, and a digest that identifies the weights.

Reads headers and samples only, and imports no torch: the router asks for the identity of the weights too. Loading them
is `baton.engine.models.loading`.

Invariant: each problem is a `ModelLoadError` with the names of the tensors or files in it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from baton.engine.models.gguf.file import read_tensors
from baton.wire.errors import ModelLoadError

if TYPE_CHECKING:
    from baton.engine.models.gguf.weights import View

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
GGUF_FILE = "model.gguf"
_PICKLED = "pytorch_model.bin"

_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format
_NUM_SAMPLES = 64
_SAMPLE_BYTES = 4096
_MAX_NAMES_IN_ERROR = 8
_GGUF_DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I8": 1, "U8": 1}


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, sorted by name: the single file, else the shards that the index names.
    Raises `ModelLoadError` when there are none or one of them is missing."""
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.is_file():
        return [single]
    if not index.is_file() and (folder / GGUF_FILE).is_file():
        return [folder / GGUF_FILE]
    if not index.is_file():
        other = "" if not (folder / _PICKLED).is_file() else f"; {_PICKLED} is not read: convert it to safetensors"
        raise ModelLoadError(f"{folder}: no weights: neither {SINGLE_FILE} nor {INDEX_FILE} is there{other}")
    names = _shard_names(index)
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ModelLoadError(f"{folder}: {INDEX_FILE} names files that are missing: {listed(missing)}")
    return [folder / name for name in names]


@dataclass(frozen=True)
class TensorEntry:
    """The entry of one tensor in a safetensors header."""

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int

    @property
    def num_elements(self) -> int:
        """The number of elements of the tensor."""
        return math.prod(self.shape)


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of a safetensors file, in file order, by name. Raises `ModelLoadError` when the header cannot be
    right or does not describe exactly the bytes of the file (a truncated download). Of a GGUF file: see
    `baton.engine.models.gguf.weights`."""
    if path.name == GGUF_FILE:
        # imported late: its blocks are read with numpy, which routers do without
        from baton.engine.models.gguf.weights import views

        return {name: _view_entry(view) for name, view in views(read_tensors(path)).items()}
    try:
        content, data_bytes = _raw_header(path)
        decoded = json.loads(content)
        decoded.pop("__metadata__", None)
        ordered = sorted(decoded.items(), key=lambda item: item[1]["data_offsets"])
        header = {name: _entry(fields) for name, fields in ordered}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelLoadError(f"{path}: not a valid safetensors file: {error!r}") from error
    described = sum(entry.num_bytes for entry in header.values())
    if described != data_bytes:
        raise ModelLoadError(
            f"{path}: truncated or damaged: its header describes {described} bytes of tensors, there are {data_bytes}"
        )
    return header


def weights_digest(folder: Path) -> str:
    """Identity of the weights in a folder, as 32 hexadecimal digits. Raises `ModelLoadError`.

    It covers each file's name, size and header, and 64 samples of 4 KiB spread evenly from its first to its last byte.
    So 256 KiB are read of a file, whatever its size. It tells checkpoints and revisions apart, and does not prove that
    no bit has changed.
    """
    digest = xxhash.xxh3_128()
    for path in weight_files(folder):
        header, _ = _raw_header(path)
        size = path.stat().st_size
        digest.update(f"{path.name}\n{size}\n{len(header)}\n".encode())
        digest.update(header)
        with path.open("rb") as file:
            for sample in range(_NUM_SAMPLES):
                file.seek(max(size - _SAMPLE_BYTES, 0) * sample // (_NUM_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _shard_names(index: Path) -> list[str]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        names = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelLoadError(f"{index}: not a valid weight index: {error!r}") from error
    for name in names:
        # A shard lies beside its index: a path would reach out of the checkpoint.
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelLoadError(f"{index}: {name!r} is not the name of a safetensors file beside it")
    if not names:
        raise ModelLoadError(f"{index}: names no weight file")
    return names


def _view_entry(view: View) -> TensorEntry:
    return TensorEntry(view.dtype, view.shape, math.prod(view.shape) * _GGUF_DTYPE_BYTES[view.dtype])


def _raw_header(path: Path) -> tuple[bytes, int]:
    """The bytes of a header and the number of bytes after them."""
    if path.name == GGUF_FILE:
        num_bytes = read_tensors(path).header_bytes
        with path.open("rb") as opened:
            return opened.read(num_bytes), path.stat().st_size - num_bytes
    try:
        with path.open("rb") as file:
            prefix = file.read(8)
            header_bytes = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or header_bytes > _MAX_HEADER_BYTES:
                raise ModelLoadError(f"{path}: not a safetensors file: its first 8 bytes give no header length")
            header = file.read(header_bytes)
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from error
    if len(header) < header_bytes:
        raise ModelLoadError(f"{path}: truncated within its header")
    return header, path.stat().st_size - 8 - header_bytes


def _entry(fields: dict[str, Any]) -> TensorEntry:
    first, last = fields["data_offsets"]
    return TensorEntry(str(fields["dtype"]), tuple(int(size) for size in fields["shape"]), int(last) - int(first))


def listed(names: Sequence[str]) -> str:
    """Names for an error message, the first of them when they are many."""
    shown = ", ".join(names[:_MAX_NAMES_IN_ERROR])
    return shown if len(names) <= _MAX_NAMES_IN_ERROR else f"{shown} and {len(names) - _MAX_NAMES_IN_ERROR} more"
