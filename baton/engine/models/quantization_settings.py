"""What `quantization_config` of a `config.json` says. Imports no torch.

Owns the fields of each method, and refusing by name what is not supported of it: nothing may be left out that changes
what a number in the files means.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.engine.models.config_fields import Fields
from baton.wire.errors import ModelLoadError

GGUF, GPTQ, AWQ, COMPRESSED, FP8 = "gguf", "gptq", "awq", "compressed-tensors", "fp8"
METHODS = (GGUF, GPTQ, AWQ, COMPRESSED, FP8)
"""The methods of quantization that checkpoints may have, by `quant_method`."""
_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_INSTEAD = {
    "bitsandbytes": "; --quantization int4 or int8 does as much with the checkpoint that this one was made of",
}
_STRATEGIES = ("tensor", "channel", "group", "block")


@dataclass(frozen=True)
class PublishedQuantization:
    """`method`: of `METHODS`. `group_size`: inputs that have a scale together, 0 for all of an output. `block`: outputs
    and inputs of a block that has one scale, () for none. `is_zero_stored_less_one`: of GPTQ's first format.
    `has_activations`: the method rounds activations too, which Baton does not. `has_kv_scales`: the files may have
    scales for KV in 8 bits, which Baton does not need: each token and head has its own."""

    method: str
    bits: int = 8
    group_size: int = 0
    block: tuple[int, ...] = ()
    is_zero_stored_less_one: bool = False
    has_activations: bool = False
    has_kv_scales: bool = False


class _Content:
    """The fields of `quantization_config`."""

    def __init__(self, content: Mapping[str, Any], place: str = "quantization_config") -> None:
        self._content = content
        self._place = place

    def error(self, name: str, must: str) -> ModelLoadError:
        return ModelLoadError(
            f"config.json: {self._place}.{name} must be {must}, got {self._content.get(name)!r:.100}: nothing else of "
            "this method is supported"
        )

    def one_of(self, name: str, allowed: tuple[object, ...], default: object = None) -> Any:
        value = self._content.get(name, default)
        if not any(value is each or (value == each and type(value) is type(each)) for each in allowed):
            raise self.error(name, " or ".join(map(repr, allowed)))
        return value

    def group_size(self) -> int:
        value = self._content.get("group_size", -1)
        if isinstance(value, bool) or not isinstance(value, int) or not (value == -1 or 16 <= value <= 1 << 20):
            raise self.error("group_size", "-1, or at least 16")
        if value % 2 and value != -1:
            raise self.error("group_size", "even")
        return max(value, 0)

    def inner(self, name: str) -> _Content:
        value = self._content.get(name)
        if not isinstance(value, dict):
            raise self.error(name, "an object")
        return _Content(value, f"{self._place}.{name}")

    def has(self, name: str) -> bool:
        return bool(self._content.get(name))

    def values(self) -> list[str]:
        return list(self._content)


def refusal_of(method: object) -> ModelLoadError:
    """The error for a method that is none of `METHODS`."""
    instead = _INSTEAD.get(method, "") if isinstance(method, str) else ""
    return ModelLoadError(
        f"config.json: quantization_config (quant_method {method!r:.50}) is not supported; supported: "
        f"{', '.join(METHODS)}{instead}"
    )


def read_quantization(fields: Fields, family_method: str) -> PublishedQuantization | None:
    """None for a plain checkpoint, and for the method that is a family's own. Raises `ModelLoadError`."""
    found = fields.raw("quantization_config")
    if not isinstance(found, dict) or found.get("quant_method") == family_method:
        return None
    content = _Content(found)
    method = content.one_of("quant_method", METHODS)
    readers = {GPTQ: _gptq, AWQ: _awq, COMPRESSED: _compressed, FP8: _fp8}
    return readers[method](content) if method in readers else PublishedQuantization(method)


def _gptq(content: _Content) -> PublishedQuantization:
    for name in ("dynamic", "meta_quantizers"):
        content.one_of(name, (None, {}))
    bits = content.one_of("bits", (4, 8))
    first = content.one_of("checkpoint_format", ("gptq", "gptq_v2"), "gptq") == "gptq"
    return PublishedQuantization(GPTQ, bits, content.group_size(), is_zero_stored_less_one=first)


def _awq(content: _Content) -> PublishedQuantization:
    content.one_of("bits", (4,))
    content.one_of("version", ("gemm", "GEMM"), "gemm")
    content.one_of("zero_point", (True,), True)
    return PublishedQuantization(AWQ, 4, content.group_size())


def _fp8(content: _Content) -> PublishedQuantization:
    content.one_of("activation_scheme", ("dynamic", "static"), "dynamic")
    content.one_of("fmt", ("e4m3",), "e4m3")
    return PublishedQuantization(
        FP8,
        block=_block(content, "weight_block_size"),
        has_activations=True,
        has_kv_scales=content.has("kv_cache_scheme"),
    )


def _compressed(content: _Content) -> PublishedQuantization:
    for name in ("sparsity_config", "transform_config"):
        content.one_of(name, (None, {}))
    content.one_of("quantization_status", ("compressed", None))
    content.one_of("format", _FORMATS)
    groups = content.inner("config_groups")
    if len(groups.values()) != 1:
        raise content.error("config_groups", "one group")
    group = groups.inner(groups.values()[0])
    group.one_of("targets", (["Linear"],))
    weights = group.inner("weights")
    bits = weights.one_of("num_bits", (4, 8))
    weights.one_of("type", ("int", "float") if bits == 8 else ("int",))
    strategy = weights.one_of("strategy", _STRATEGIES)
    return PublishedQuantization(
        COMPRESSED,
        bits,
        weights.group_size() if strategy == "group" else 0,
        _block(weights, "block_structure") if strategy == "block" else (),
        has_activations=group.has("input_activations"),
        has_kv_scales=content.has("kv_cache_scheme"),
    )


def _block(content: _Content, name: str) -> tuple[int, ...]:
    if not content.has(name):
        return ()
    return tuple(content.one_of(name, ([128, 128],)))
