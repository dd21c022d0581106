"""Weights as a stream: safetensors shards through a fusion table straight into the parameters of a decoder.

Owns: the names that published checkpoints use, which of them share one fused parameter, and the completeness check: a
load that returns has written every element of every parameter from exactly one tensor, and has used every tensor of
the files. Does not know what the parameters mean, and imports no torch: `weights_digest` is for programs without it.

Invariant: each problem is a `ModelLoadError` with the names of the tensors or files in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash
from safetensors import SafetensorError, safe_open

from engine.models.config import ModelConfig
from wire.errors import ModelLoadError

if TYPE_CHECKING:
    from torch import Tensor

    from engine.models.decoder import Decoder

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

HEAD_NAME = "lm_head.weight"

_FLOAT_DTYPES = ("F32", "F16", "BF16", "F64")
_DERIVED = re.compile(r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)")
"""Tables that old checkpoints carry; they follow from the config."""
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format
_NUM_SAMPLES = 64
_SAMPLE_BYTES = 4096
_MAX_NAMES_IN_ERROR = 8


@dataclass(frozen=True)
class Part:
    """The place of one checkpoint tensor: `num_rows` rows of `parameter` from `first_row` on. `shape` is the tensor's
    own; a tensor with one dimension less than the parameter is repeated on each row."""

    parameter: str
    first_row: int
    num_rows: int
    shape: tuple[int, ...]


def fusion_table(config: ModelConfig) -> dict[str, Part]:
    """Checkpoint tensor name to its place, for every tensor that a checkpoint of this config must have."""
    size = config.hidden_size
    table = {
        "model.embed_tokens.weight": Part("embedding", 0, config.vocab_size, (config.vocab_size, size)),
        "model.norm.weight": Part("norm", 0, size, (size,)),
    }
    if not config.tie_word_embeddings:
        table[HEAD_NAME] = Part("head.weight", 0, config.vocab_size, (config.vocab_size, size))
    for layer in range(config.num_layers):
        for name, part in _layer_table(config):
            table[f"model.layers.{layer}.{name}"] = Part(
                f"layers.{layer}.{part.parameter}", part.first_row, part.num_rows, part.shape
            )
    return table


def _layer_table(config: ModelConfig) -> Iterable[tuple[str, Part]]:
    size, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    # checkpoint name, fused parameter, first row, rows, columns, has a bias
    matrices = (
        ("self_attn.q_proj", "qkv", 0, q, size, config.qkv_bias),
        ("self_attn.k_proj", "qkv", q, kv, size, config.qkv_bias),
        ("self_attn.v_proj", "qkv", q + kv, kv, size, config.qkv_bias),
        ("self_attn.o_proj", "o", 0, size, q, config.o_bias),
        ("mlp.gate_proj", "gate_up", 0, inner, size, config.mlp_bias),
        ("mlp.up_proj", "gate_up", inner, inner, size, config.mlp_bias),
        ("mlp.down_proj", "down", 0, size, inner, config.mlp_bias),
    )
    for name, fused, first_row, rows, columns, has_bias in matrices:
        yield f"{name}.weight", Part(f"{fused}.weight", first_row, rows, (rows, columns))
        if has_bias:
            yield f"{name}.bias", Part(f"{fused}.bias", first_row, rows, (rows,))
    yield "input_layernorm.weight", Part("input_norm", 0, size, (size,))
    yield "post_attention_layernorm.weight", Part("mlp_norm", 0, size, (size,))
    if config.qk_norm:
        heads, kv_heads = config.num_heads, config.num_kv_heads
        yield "self_attn.q_norm.weight", Part("qk_norm", 0, heads, (config.head_dim,))
        yield "self_attn.k_norm.weight", Part("qk_norm", heads, kv_heads, (config.head_dim,))


def load_weights(folder: Path, decoder: Decoder, progress: Callable[[int, int], None] | None = None) -> None:
    """Fill every parameter of `decoder` from the checkpoint in `folder`, converting to its dtype, then pack it.

    `progress(bytes_done, bytes_total)` counts the tensor bytes of the files: first call (0, total), last (total,
    total). Names, shapes and file sizes are all checked before the first byte is copied. Raises `ModelLoadError`.
    """
    headers = {path: read_header(path) for path in weight_files(folder)}
    table = fusion_table(decoder.config)
    _check_complete(headers, table, decoder.config)
    parameters = decoder.parameters()
    bytes_total = sum(entry.num_bytes for header in headers.values() for entry in header.values())
    bytes_done = 0
    if progress is not None:
        progress(0, bytes_total)
    for path, header in headers.items():
        for name, tensor in _tensors(path, header):
            part = table.get(name)
            if part is not None:
                parameters[part.parameter].narrow(0, part.first_row, part.num_rows).copy_(tensor)
            bytes_done += header[name].num_bytes
            if progress is not None:
                progress(bytes_done, bytes_total)
    if decoder.config.tie_word_embeddings:
        _check_tied_head(headers, parameters["embedding"])
    decoder.pack()


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, sorted by name: the single file, else the shards that the index names.
    Raises `ModelLoadError` when there are none or one of them is missing."""
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ModelLoadError(f"{folder}: no weights: neither {SINGLE_FILE} nor {INDEX_FILE} is there")
    names = _shard_names(index)
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ModelLoadError(f"{folder}: {INDEX_FILE} names files that are missing: {_listed(missing)}")
    return [folder / name for name in names]


@dataclass(frozen=True)
class TensorEntry:
    """What a safetensors header says of one tensor."""

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of a safetensors file, in file order, by name. Raises `ModelLoadError` when the header cannot be
    right or does not describe exactly the bytes of the file (a truncated download)."""
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
    """Identity of the weights in a folder: 32 hexadecimal digits over each file's name, size, header and 64 samples of
    4 KiB spread evenly from its first to its last byte. Reads 256 KiB a file, whatever its size: it tells checkpoints
    and revisions apart, and does not prove that no bit has changed. Raises `ModelLoadError`."""
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


def _raw_header(path: Path) -> tuple[bytes, int]:
    """The JSON bytes of a safetensors header and the number of bytes after them."""
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


def _check_complete(headers: dict[Path, dict[str, TensorEntry]], table: dict[str, Part], config: ModelConfig) -> None:
    found: dict[str, TensorEntry] = {}
    for path, header in headers.items():
        twice = [name for name in header if name in found]
        if twice:
            raise ModelLoadError(f"{path}: tensors that another file has too: {_listed(twice)}")
        found.update(header)
    missing = [name for name in table if name not in found]
    if missing:
        half_filled = _half_filled(missing, table)
        note = f"; fused parameters left half filled: {_listed(half_filled)}" if half_filled else ""
        raise ModelLoadError(f"the checkpoint lacks {len(missing)} tensors: {_listed(missing)}{note}")
    unused = [name for name in found if name not in table and not _is_ignorable(name, config)]
    if unused:
        raise ModelLoadError(
            f"the checkpoint has {len(unused)} tensors that {config.architecture} does not use: {_listed(unused)}"
        )
    for name, part in table.items():
        entry = found[name]
        if entry.shape != part.shape:
            raise ModelLoadError(f"{name} has shape {list(entry.shape)}, config.json makes it {list(part.shape)}")
        if entry.dtype not in _FLOAT_DTYPES:
            raise ModelLoadError(
                f"{name} has dtype {entry.dtype}, which is not supported; supported: {', '.join(_FLOAT_DTYPES)}"
            )


def _half_filled(missing: list[str], table: dict[str, Part]) -> list[str]:
    """Parameters of which some parts are missing and some are there."""
    absent = set(missing)
    lacking = {table[name].parameter for name in missing}
    return sorted({part.parameter for name, part in table.items() if name not in absent} & lacking)


def _is_ignorable(name: str, config: ModelConfig) -> bool:
    if name == HEAD_NAME:
        return config.tie_word_embeddings
    return _DERIVED.fullmatch(name) is not None


def _tensors(path: Path, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """The named tensors of a file, one at a time, each a view of the mapped file rather than a copy of it."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in names:
                yield name, file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path}: cannot be read: {error}") from error


def _check_tied_head(headers: dict[Path, dict[str, TensorEntry]], embedding: Tensor) -> None:
    """A head stored beside the embedding it is tied to must be equal to it, else the config contradicts the file."""
    for path, header in headers.items():
        for _, tensor in _tensors(path, [HEAD_NAME] if HEAD_NAME in header else []):
            if tensor.shape != embedding.shape or not tensor.to(embedding).equal(embedding):
                raise ModelLoadError(
                    f"{path}: {HEAD_NAME} differs from the embedding, but config.json says tie_word_embeddings"
                )


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMES_IN_ERROR])
    return shown if len(names) <= _MAX_NAMES_IN_ERROR else f"{shown} and {len(names) - _MAX_NAMES_IN_ERROR} more"
