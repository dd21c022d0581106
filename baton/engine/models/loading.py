"""Weights as a stream: safetensors shards straight into the parameters of a model, each piece to its place.

Owns the completeness check: a load that returns has written every element of every parameter exactly once, and has used
every tensor of the files. The model's parts define the parameters and the tensors that they are made of (`Parameter`).

Invariant: each problem is a `ModelLoadError` with the names of the tensors or files in it. Names, shapes, dtypes and
file sizes are all checked before the first byte is copied.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from baton.engine.models.gguf.weights import opened_gguf
from baton.engine.models.parameters import Parameter, Source, slices
from baton.engine.models.parts.base import Part
from baton.engine.models.weight_files import GGUF_FILE, TensorEntry, listed, read_header, weight_files
from baton.wire.errors import ModelLoadError

OnProgress: TypeAlias = Callable[[int, int], None]
"""Called with (done, total)."""
_FLOAT_DTYPES = ("F32", "F16", "BF16", "F64")
_DTYPES = {
    "torch.uint8": ("U8",),
    "torch.int8": ("I8",),
    "torch.int32": ("I32",),
    "torch.int64": ("I64",),
    "torch.float8_e4m3fn": ("F8_E4M3",),
}
"""Of files, by that of the parameter, where it is not converted."""
_DERIVED = re.compile(r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)")
"""Tables that old checkpoints carry; they follow from the config."""
_log = logging.getLogger(__name__)
_SCALES = ("weight_scale", "weight_scale_inv")


class Loadable(Protocol):
    """What is made of a checkpoint's tensors: a decoder, or a head."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which it computes."""
        ...

    @property
    def architecture(self) -> str:
        """What it is, for messages."""
        ...

    def parts(self) -> Iterator[Part]:
        """All parts, each of which is packed when its parameters are loaded."""
        ...

    def parameters(self) -> Iterator[Parameter]:
        """All parameters, before anything is packed."""
        ...

    def leaves_out(self, name: str) -> bool:
        """Whether this tensor of the checkpoint need not be used."""
        ...


@dataclass(frozen=True, slots=True)
class _Use:
    """A checkpoint tensor's place in a parameter."""

    parameter: Parameter
    source: Source


class _Uses:
    """Where each tensor of a checkpoint goes, by name. `copies`: names of further tensors that repeat a parameter."""

    def __init__(self, parameters: Iterable[Parameter]) -> None:
        self.by_name: dict[str, list[_Use]] = {}
        self.copies: dict[str, Parameter] = {}
        for parameter in parameters:
            if not parameter.is_covered:
                names = [source.name for source in parameter.sources]
                raise ModelLoadError(f"{parameter.name} is not written exactly once by {listed(names) or 'any tensor'}")
            for source in parameter.sources:
                self.by_name.setdefault(source.name, []).append(_Use(parameter, source))
            self.copies.update(dict.fromkeys(parameter.copies, parameter))

    def half_filled(self, missing: Sequence[str]) -> list[str]:
        """Parameters of which some tensors are missing and some are there."""
        absent = set(missing)
        lacking = {use.parameter.name for name in missing for use in self.by_name[name]}
        begun = {use.parameter.name for name, uses in self.by_name.items() if name not in absent for use in uses}
        return sorted(lacking & begun)


def load_weights(folder: Path, model: Loadable, progress: OnProgress | None = None) -> None:
    """Fill every parameter of `model` from the checkpoint in `folder`, converting to its dtype, and pack each part as
    soon as it is filled: a model that is quantized while it is loaded takes little more than it takes afterwards.

    `progress(bytes_done, bytes_total)` counts the tensor bytes of the files, those that a shard leaves out included:
    first call (0, total), last (total, total). Raises `ModelLoadError`.
    """
    headers = {path: read_header(path) for path in weight_files(folder)}
    uses = _Uses(model.parameters())
    _check_complete(headers, uses, model)
    _report_mixed(headers, uses, model)
    for parameter in model.parameters():
        parameter.take_memory_back()
    waiting = _Waiting(model)
    bytes_total = sum(entry.num_bytes for header in headers.values() for entry in header.values())
    bytes_done = 0
    if progress is not None:
        progress(0, bytes_total)
    for path, header in headers.items():
        with _opened(path) as file:
            for name, entry in header.items():
                # forgotten: nothing may keep a plain weight that is packed
                for use in uses.by_name.pop(name, ()):
                    _write(file, use)
                waiting.written(name)
                bytes_done += entry.num_bytes
                if progress is not None:
                    progress(bytes_done, bytes_total)
    _check_copies(headers, uses.copies)
    waiting.finish()


def _report_mixed(headers: Mapping[Path, Mapping[str, TensorEntry]], uses: _Uses, model: Loadable) -> None:
    """One log line where matrices have several dtypes, and so some of them another one than is computed in. Norms,
    biases and scales often have."""
    examples: dict[str, str] = {}
    for header in headers.values():
        for name, entry in header.items():
            is_matrix = len(entry.shape) > 1 and "scale" not in name and entry.dtype in _FLOAT_DTYPES
            if is_matrix and name in uses.by_name:
                examples.setdefault(entry.dtype, name)
    if len(examples) > 1:
        found = ", ".join(f"{dtype} ({name})" for dtype, name in sorted(examples.items()))
        computed = str(model.dtype).removeprefix("torch.")
        _log.warning("the checkpoint has matrices of several dtypes, and all are converted to %s: %s", computed, found)


class _Waiting:
    """Parts of a model that still lack tensors, and are packed when they have them all."""

    def __init__(self, model: Loadable) -> None:
        self._parts: dict[int, tuple[Part, set[str]]] = {}
        self._of_name: dict[str, list[int]] = {}
        for number, part in enumerate(model.parts()):
            names = {source.name for parameter in part.parameters() for source in parameter.sources}
            self._parts[number] = (part, names)
            for name in names:
                self._of_name.setdefault(name, []).append(number)

    def written(self, name: str) -> None:
        """A tensor has gone where it belongs."""
        for number in self._of_name.pop(name, ()):
            names = self._parts[number][1]
            names.remove(name)
            if not names:
                self._finish(number)

    def finish(self) -> None:
        """Pack parts that have nothing of their own to load."""
        for number in tuple(self._parts):
            self._finish(number)

    def _finish(self, number: int) -> None:
        part, _ = self._parts.pop(number)
        _check_numbers(part.parameters())
        part.pack()


def check_weights(folder: Path, model: Loadable) -> None:
    """Compare the headers of the files with what `model` needs, which may be on the device "meta": before anything is
    allocated. Raises `ModelLoadError`."""
    headers = {path: read_header(path) for path in weight_files(folder)}
    _check_complete(headers, _Uses(model.parameters()), model)


def _check_complete(headers: Mapping[Path, Mapping[str, TensorEntry]], uses: _Uses, model: Loadable) -> None:
    found: dict[str, TensorEntry] = {}
    for path, header in headers.items():
        twice = [name for name in header if name in found]
        if twice:
            raise ModelLoadError(f"{path}: tensors that another file has too: {listed(twice)}")
        found.update(header)
    missing = [name for name in uses.by_name if name not in found]
    if missing:
        half_filled = uses.half_filled(missing)
        note = f"; fused parameters left half filled: {listed(half_filled)}" if half_filled else ""
        raise ModelLoadError(f"the checkpoint lacks {len(missing)} tensors: {listed(missing)}{note}")
    used = {*uses.by_name, *uses.copies}
    unused = [
        name for name in found if name not in used and not _DERIVED.fullmatch(name) and not model.leaves_out(name)
    ]
    if unused:
        raise ModelLoadError(
            f"the checkpoint has {len(unused)} tensors that {model.architecture} does not use: {listed(unused)}"
        )
    for name, of_name in uses.by_name.items():
        for use in of_name:
            _check_entry(found[name], use)


def _check_entry(entry: TensorEntry, use: _Use) -> None:
    source = use.source
    if entry.shape != source.shape:
        raise ModelLoadError(f"{source.name} has shape {list(entry.shape)}, config.json makes it {list(source.shape)}")
    supported = _DTYPES.get(str(use.parameter.tensor.dtype), _FLOAT_DTYPES)
    if entry.dtype not in supported:
        raise ModelLoadError(
            f"{source.name} has dtype {entry.dtype}, which is not supported; supported: {', '.join(supported)}"
        )


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The file, mapped; whatever cannot be read of it is a `ModelLoadError`."""
    if path.name == GGUF_FILE:
        with opened_gguf(path) as gguf:
            yield gguf
        return
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path}: cannot be read: {error}") from error


def _write(file: Any, use: _Use) -> None:
    """Copy what `use` takes of its tensor. A whole tensor is a view of the mapped file; of others only the piece is
    read."""
    source = use.source
    if source.is_empty:
        return
    tensor = use.parameter.tensor
    use.parameter.allocate()
    piece = file.get_tensor(source.name) if source.is_whole else file.get_slice(source.name)[slices(source.taken)]
    tensor[slices(source.region)].copy_(piece.T if source.is_transposed else piece)


def _check_numbers(parameters: Iterable[Parameter]) -> None:
    """A NaN or an infinity in a weight fails every request, and a matrix of zeros is one that was never written;
    finding them costs one pass over memory."""
    for parameter in parameters:
        dtype = str(parameter.tensor.dtype).removeprefix("torch.")
        for source in parameter.sources:
            name = source.name
            low, high = _bounds(parameter.tensor[slices(source.region)])
            if not (math.isfinite(low) and math.isfinite(high)):
                raise ModelLoadError(f"there are NaN or infinite numbers in {dtype} in what is loaded from {name}")
            is_whole = len(source.shape) > 1 or name.endswith(_SCALES)
            if low == high == 0.0 and is_whole and parameter.tensor.is_floating_point():
                raise ModelLoadError(f"{name} has nothing but zeros: the file was not written completely")


def _bounds(tensor: Tensor) -> tuple[float, float]:
    """The least and the greatest number, NaN if there is one."""
    if tensor.dtype == torch.float8_e4m3fn:
        # without their signs their bits are in the order of the numbers, and the last ones are NaN
        bits = tensor.view(torch.uint8) & 0x7F
        most = int(bits.max()) if bits.numel() else 1
        return (math.nan, math.nan) if most == 0x7F else (-float(most), float(most))
    if tensor.numel() == 0:
        return (1.0, 1.0)
    low, high = tensor.aminmax()
    return float(low), float(high)


def _check_copies(headers: Mapping[Path, Mapping[str, TensorEntry]], copies: Mapping[str, Parameter]) -> None:
    """A head stored beside the embedding it is tied to must be equal to it, else the config contradicts the file."""
    for path, name in ((path, name) for path, header in headers.items() for name in header if name in copies):
        (source,) = copies[name].sources
        with _opened(path) as file:
            piece = file.get_slice(name)
            # all of it as it is: where it is no copy it may have any shape
            copy: Tensor = file.get_tensor(name) if source.is_whole else piece[slices(source.taken)]
        loaded = copies[name].tensor
        if copy.shape != loaded.shape or not copy.to(loaded).equal(loaded):
            raise ModelLoadError(
                f"{path}: {name} differs from the {copies[name].name}, but config.json says tie_word_embeddings"
            )
