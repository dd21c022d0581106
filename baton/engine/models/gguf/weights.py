"""The tensors of a GGUF file as those of a checkpoint folder: under its names, quantized ones in parts.

Owns the views. A quantized matrix NAME is NAME.codes, NAME.scales and, where it has some, NAME.offsets
(`baton.engine.models.quantization.parts`). The embedding is there as plain numbers, and if the head is tied to it also
in parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from baton.engine.models.gguf.blocks import BLOCK_KINDS, Decoded, numbers_of
from baton.engine.models.gguf.file import GgufFile, GgufTensor, read_tensors
from baton.engine.models.gguf.names import published_name
from baton.wire.errors import ModelLoadError

if TYPE_CHECKING:
    from torch import Tensor

HEAD, EMBEDDING = "output.weight", "token_embd.weight"


@dataclass(frozen=True)
class View:
    """One tensor of the folder: `dtype` and `shape` as a safetensors header has them. `part`: "" for plain numbers."""

    tensor: GgufTensor
    part: str
    dtype: str
    shape: tuple[int, ...]


def views(file: GgufFile) -> dict[str, View]:
    """All tensors by the folder's names."""
    found: dict[str, View] = {}
    for name, tensor in file.tensors.items():
        published = published_name(name)
        kind = BLOCK_KINDS.get(tensor.type.name)
        if kind is None:
            found[published] = View(tensor, "", tensor.type.name, tensor.shape)
            continue
        if len(tensor.shape) != 2:
            raise ModelLoadError(f"{file.path}: {name} is quantized, and no matrix")
        if name == EMBEDDING:
            found[published] = View(tensor, "", "F32", tensor.shape)
            if HEAD in file.tensors:
                continue
        base = published.removesuffix(".weight")
        num_out, num_in = tensor.shape
        groups = (num_out, num_in // kind.group_size)
        codes = ("I8", (num_out, num_in)) if kind.bits == 8 else ("U8", (num_out, num_in // 2))
        found[f"{base}.codes"] = View(tensor, "codes", *codes)
        found[f"{base}.scales"] = View(tensor, "scales", "F32", groups)
        if kind.has_offsets:
            found[f"{base}.offsets"] = View(tensor, "offsets", "F32", groups)
    return found


@contextmanager
def opened_gguf(path: Path) -> Iterator[OpenGguf]:
    """The file, mapped, with the calls of a safetensors file."""
    yield OpenGguf(path)


class OpenGguf:
    """Reads views. Keeps what it has decoded last: the parts of a matrix are asked for one after another."""

    def __init__(self, path: Path) -> None:
        self._views = views(read_tensors(path))
        # what is written into a tensor stays in this process; nobody does, but torch wants to be allowed to
        self._bytes = np.memmap(path, dtype=np.uint8, mode="c")
        self._decoded: tuple[tuple[int, int], Decoded] | None = None

    def get_tensor(self, name: str) -> Tensor:
        """The whole tensor of that name, decoded."""
        return self._read(self._views[name], None)

    def get_slice(self, name: str) -> _Slice:
        """The tensor of that name, as a value of which slices are read and decoded."""
        view = self._views[name]
        return _Slice(lambda rows: self._read(view, rows))

    def _read(self, view: View, rows: slice | None) -> Tensor:
        import torch

        tensor = view.tensor
        chosen = range(*(rows or slice(None)).indices(tensor.shape[0] if len(tensor.shape) > 1 else 1))
        first = tensor.offset + chosen.start * tensor.row_bytes
        raw = np.asarray(self._bytes[first : first + len(chosen) * tensor.row_bytes])
        shape = (len(chosen), *tensor.shape[1:]) if len(tensor.shape) > 1 else tensor.shape
        kind = BLOCK_KINDS.get(tensor.type.name)
        if kind is None:
            numbers = torch.from_numpy(raw)
            dtypes = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
            return numbers.view(dtypes[tensor.type.name]).view(shape)
        if self._decoded is None or self._decoded[0] != (first, len(raw)):
            self._decoded = (first, len(raw)), kind.decode(raw.reshape(len(chosen), -1, tensor.type.block_bytes))
        decoded = self._decoded[1]
        if not view.part:
            return torch.from_numpy(numbers_of(decoded, kind.group_size))
        return torch.from_numpy(np.ascontiguousarray(getattr(decoded, view.part)))


class _Slice:
    def __init__(self, read: Callable[[slice], Tensor]) -> None:
        self._read = read

    def __getitem__(self, box: tuple[slice, ...]) -> Any:
        if len(box) == 1:
            return self._read(slice(None))[box[0]]
        return self._read(box[0])[:, box[1]]
