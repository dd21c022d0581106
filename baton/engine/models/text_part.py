"""The text part of a checkpoint that was made for images, too.

Owns which of these architectures have a text part that Baton computes, where its fields stand in `config.json`, what
its tensors are called, and which tensors belong to the other parts. Images are not served: the router refuses them in
a request. Imports no torch.

Text has one position in each of the three dimensions of such a model's rotation, which is then a plain one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from baton.engine.models.config_fields import Fields
from baton.engine.models.names import Names
from baton.engine.models.weight_files import read_header, weight_files

_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "model.text_model.")
"""What names of the text part begin with, depending on the program that wrote the files."""
_HEADS = ("lm_head", "language_model.lm_head", "model.lm_head")
OTHER_PARTS = tuple(
    f"{prefix}{part}." for part in ("visual", "vision_tower", "multi_modal_projector") for prefix in ("", "model.")
)
"""What the names of tensors begin with that text does not need."""
_OF_ROPE = ("mrope_section", "mrope_interleaved")
_OF_BOTH = ("bos_token_id", "eos_token_id", "dtype", "torch_dtype", "quantization_config")
"""Fields of the whole model that count for its text part as well."""


@dataclass(frozen=True)
class TextPart:
    """`architecture`: by which the text part is computed. `defaults`: of fields that published files leave out.
    `ties_by_either`: the head is tied when the whole model or its text part says so; else the whole model decides."""

    architecture: str
    defaults: Mapping[str, object] = field(default_factory=dict)
    ties_by_either: bool = False


_QWEN2 = TextPart(
    "Qwen2ForCausalLM",
    {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "eos_token_id": 151_645, "max_window_layers": 80},
    ties_by_either=True,
)
TEXT_PARTS: Mapping[str, TextPart] = {
    "Qwen2VLForConditionalGeneration": _QWEN2,
    "Qwen2_5_VLForConditionalGeneration": _QWEN2,
    "Qwen3VLForConditionalGeneration": TextPart("Qwen3ForCausalLM", {"rope_theta": 5e5}, ties_by_either=True),
    "Gemma3ForConditionalGeneration": TextPart(
        "Gemma3ForCausalLM",
        {
            "vocab_size": 262_208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-6,
        },
    ),
    "Mistral3ForConditionalGeneration": TextPart("MistralForCausalLM"),
}
"""By the name that stands in `config.json`."""


def text_part_of(content: Mapping[str, Any]) -> TextPart | None:
    """The text part of the model that `content`, a decoded `config.json`, describes; None for a model of text alone."""
    architectures = content.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1 or not isinstance(architectures[0], str):
        return None
    return TEXT_PARTS.get(architectures[0])


def text_content(content: dict[str, Any], part: TextPart) -> dict[str, Any]:
    """The fields of the text part as a model of text alone has them. Older files have no `text_config`: its fields
    stand among the others. Raises `ModelLoadError`."""
    nested = content.get("text_config")
    if nested is not None and not isinstance(nested, dict):
        raise Fields(content, "config.json").error("text_config", "an object")
    text = content if nested is None else nested
    found = {**part.defaults, **text, "architectures": [part.architecture]}
    found |= {name: content[name] for name in _OF_BOTH if content.get(name) is not None}
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(found.get(name), dict):
            found[name] = _plain_rope(found[name])
    ties = [each["tie_word_embeddings"] for each in (content, text) if each.get("tie_word_embeddings") is not None]
    if ties:
        found["tie_word_embeddings"] = (True in ties) if part.ties_by_either else ties[0]
    return found


def _plain_rope(rope: dict[str, Any]) -> dict[str, Any]:
    if not any(name in rope for name in _OF_ROPE):
        return rope
    found = {name: value for name, value in rope.items() if name not in _OF_ROPE}
    for name in ("type", "rope_type"):
        if found.get(name) == "mrope":
            found[name] = "default"
    return found


def published_names(names: Names, folder: Path) -> Names:
    """`names` as the tensors of the text part are called in the files of `folder`. Raises `ModelLoadError`."""
    return _names_among(names, {name for path in weight_files(folder) for name in read_header(path)})


def _names_among(names: Names, published: Iterable[str]) -> Names:
    published = set(published)
    embedding = names.embedding.removeprefix(_PREFIXES[0])
    prefix = next((each for each in _PREFIXES if f"{each}{embedding}.weight" in published), _PREFIXES[0])
    own = {
        part: prefix + getattr(names, part).removeprefix(_PREFIXES[0]) for part in ("layers", "embedding", "final_norm")
    }
    head = next((each for each in _HEADS if f"{each}.weight" in published), names.head)
    return replace(names, head=head, **own)
