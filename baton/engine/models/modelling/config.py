"""What Baton must know of a model that transformers' modelling code computes, from its `config.json` alone.

Owns the few facts that are needed beside the forward pass, and the digest of the others. Imports neither torch nor
transformers: the router asks the same questions as the nodes. Whether the model can be computed at all is found out
later, from the model itself (`baton.engine.models.modelling.layers`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from baton.engine.models.config_fields import MAX_TOKENS, Fields
from baton.engine.models.text_part import TEXT_PARTS
from baton.wire.errors import ModelLoadError
from baton.wire.layout import MAX_LAYERS

_POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx")
"""Names that architectures give to the number of their positions."""
_NUMBERS_OF_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_NOT_COMPUTED = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "bos_token_id",
                 "eos_token_id", "pad_token_id")  # fmt: skip
_ROPES_BY_LENGTH = ("dynamic", "longrope")
_ENCODER_DECODER = "it has an encoder beside its decoder"


@dataclass(frozen=True)
class ModellingConfig:
    """`ModelFacts` of a model that transformers computes. `digest` covers all fields that may change its results."""

    architecture: str
    vocab_size: int
    max_context_len: int
    dtype: str | None
    eos_token_ids: tuple[int, ...]
    digest: str


def parse_modelling_config(
    content: dict[str, Any], generation: dict[str, Any], *, remote_code: bool = False
) -> ModellingConfig:
    """The facts of a decoded `config.json` and `generation_config.json`. Raises `ModelLoadError`."""
    fields = Fields(content, "config.json")
    architectures = content.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1 or not isinstance(architectures[0], str):
        raise ModelLoadError(f"config.json: architectures must be a list with one name, got {architectures!r}")
    reason = _reason_against(content, remote_code=remote_code)
    if reason:
        raise cannot_run(architectures[0], reason)
    for name in filter(fields.has, _NUMBERS_OF_LAYERS):
        fields.count(name, most=MAX_LAYERS)  # transformers makes each of them before anything is compared
    positions = next(filter(fields.has, _POSITIONS))
    ends = {*fields.token_ids("eos_token_id"), *Fields(generation, "generation_config.json").token_ids("eos_token_id")}
    computed = {name: value for name, value in content.items() if name not in _NOT_COMPUTED}
    return ModellingConfig(
        architecture=architectures[0],
        vocab_size=fields.count("vocab_size"),
        max_context_len=fields.count(positions, most=MAX_TOKENS),
        dtype=fields.dtype(),
        eos_token_ids=tuple(sorted(ends)),
        digest=blake2b(json.dumps(computed, sort_keys=True).encode(), digest_size=16).hexdigest(),
    )


def cannot_run(architecture: str, reason: str) -> ModelLoadError:
    """The refusal of a model that transformers' modelling code cannot compute here."""
    return ModelLoadError(
        f"{architecture} cannot be computed by transformers' modelling code here: {reason} (docs/models.md has the "
        "architectures that Baton computes itself)"
    )


def _reason_against(content: dict[str, Any], *, remote_code: bool) -> str:
    if content.get("auto_map") is not None and not remote_code:
        return "it needs code of the checkpoint's own (--trust-remote-code runs such code)"
    if content.get("quantization_config") is not None:
        return "its weights are quantized"
    if content.get("is_encoder_decoder"):
        return _ENCODER_DECODER
    if content.get("vision_config") is not None:
        return (
            f"it sees images, and the models of that kind of which Baton has the text part are {', '.join(TEXT_PARTS)}"
        )
    if content.get("vocab_size") is None:
        return "its config.json names no vocabulary"
    if all(content.get(name) is None for name in _POSITIONS):
        return (
            "its config.json names no number of positions, as those of models that keep a state in place of KV (Mamba) "
            "or have ALiBi (BLOOM)"
        )
    by_length = [name for name in _rope_types(content) if name in _ROPES_BY_LENGTH]
    if by_length:
        return f"the frequencies of {by_length[0]} rope follow the longest sequence of a batch"
    return ""


def _rope_types(value: object) -> Iterator[str]:
    """All rope types, wherever in the file they stand: layers of one model may have several."""
    if isinstance(value, dict):
        for name, found in value.items():
            if name in ("rope_type", "type") and isinstance(found, str):
                yield found
            yield from _rope_types(found)
