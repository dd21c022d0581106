"""The facts of a GGUF file in the words of `config.json`. Imports no torch.

Owns which architectures are known, and which facts would change what is computed and are refused.
"""

from __future__ import annotations

from typing import Any

from baton.engine.models.gguf.file import Fact, GgufFile
from baton.engine.models.gguf.weights import EMBEDDING, HEAD
from baton.wire.errors import ModelLoadError

METHOD = "gguf"
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_DTYPES = {"F32": "float32", "F16": "float16"}


class _Facts:
    """The facts of one architecture."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        architecture = file.facts.get("general.architecture")
        if architecture not in _ARCHITECTURES:
            known = ", ".join(_ARCHITECTURES)
            raise self.error(f"general.architecture {architecture!r:.100} is not supported; supported: {known}")
        self.architecture = str(architecture)

    def error(self, reason: str) -> ModelLoadError:
        return ModelLoadError(f"{self._file.path}: {reason}")

    def get(self, name: str) -> Fact | None:
        return self._file.facts.get(f"{self.architecture}.{name}")

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(f"{self.architecture}.{name} must be a number, not {value!r:.100}")
        return value

    def count(self, name: str, default: int | None = None) -> int:
        value = self.number(name, default)
        if not isinstance(value, int) or not 0 < value < 1 << 31:
            raise self.error(f"{self.architecture}.{name} must be a count, not {value!r:.100}")
        return value


def config_of(file: GgufFile) -> dict[str, Any]:
    """The fields of a `config.json`, made of the file's own. Raises `ModelLoadError`."""
    facts = _Facts(file)
    heads = facts.count("attention.head_count")
    hidden = facts.count("embedding_length")
    head_dim = facts.count("attention.key_length", max(hidden // heads, 1))
    embedding = file.tensors.get(EMBEDDING)
    if embedding is None:
        raise facts.error(f"there is no {EMBEDDING}")
    _refuse(facts, head_dim)
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[facts.architecture]],
        "model_type": facts.architecture,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": facts.count("feed_forward_length"),
        "num_hidden_layers": facts.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": facts.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": facts.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": facts.count("context_length"),
        "rope_theta": facts.number("rope.freq_base", 10000.0),
        "tie_word_embeddings": HEAD not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        # what is quantized is computed in bfloat16
        "dtype": _DTYPES.get(embedding.type.name, "bfloat16"),
        "quantization_config": {"quant_method": METHOD},
    }
    if facts.architecture == "llama":
        # its converter puts the two numbers of a rotated pair side by side
        config["rope_interleave"] = True
    scaling = _scaling(facts)
    if scaling is not None:
        config["rope_scaling"] = scaling
    for name in ("bos_token_id", "eos_token_id"):
        if isinstance(token := file.facts.get(f"tokenizer.ggml.{name}"), int):
            config[name] = token
    return config


def _refuse(facts: _Facts, head_dim: int) -> None:
    only = {"rope.dimension_count": head_dim, "attention.value_length": head_dim, "expert_count": 0}
    for name, value in only.items():
        found = facts.get(name)
        if found is not None and found != value:
            raise facts.error(f"{facts.architecture}.{name} is {found!r:.100}, and only {value} is supported")


def _scaling(facts: _Facts) -> dict[str, Any] | None:
    kind = facts.get("rope.scaling.type")
    if kind in (None, "none"):
        return None
    if kind not in ("linear", "yarn"):
        raise facts.error(f"{facts.architecture}.rope.scaling.type {kind!r:.100} is not supported: linear, yarn")
    scaling = {"rope_type": kind, "factor": facts.number("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = facts.count("rope.scaling.original_context_length")
    return scaling
