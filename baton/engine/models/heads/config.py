"""What a head is made of, as the files say it: an EAGLE-3 checkpoint, or the layer for further tokens that some models
ship beside their own (MTP).

Owns the spellings of both, and the refusal of what does not fit the model that it is for. Imports no torch.

Invariant: a config that exists fits its model, as far as `config.json` tells.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from baton.engine.models.config import ModelConfig, parse_config
from baton.engine.models.config_fields import Fields, read_json_object
from baton.engine.models.names import LoneLayer
from baton.engine.models.weight_files import read_header, weight_files
from baton.wire.errors import ModelLoadError

_NUM_TAPS = 3
_OF_SPECULATORS = "transformer_layer_config"
"""Where one published format has the fields of the layer."""
_LAYERS = ("midlayer", "layers.0")
"""What the names of the layer's tensors begin with, depending on the program that wrote the file."""


@dataclass(frozen=True)
class Eagle3Config:
    """`layer`: of the head's one layer, and of its own tables. `taps`: in front of which layers of the model the
    residual stream is read. `num_rows`: of its output layer, which may know fewer tokens than the model.
    `adds_to_normed`: the layer's residual stream begins with the normed hidden states."""

    layer: ModelConfig
    taps: tuple[int, ...]
    num_rows: int
    has_embedding: bool
    adds_to_normed: bool


def read_eagle3(folder: Path, model: ModelConfig) -> Eagle3Config:
    """The head in `folder`, for `model`. Raises `ModelLoadError`."""
    content = read_json_object(folder / "config.json")
    inner = _object(Fields(content, f"{folder}: config.json"), _OF_SPECULATORS)
    usual = {"vocab_size": model.vocab_size, "max_position_embeddings": model.max_position_embeddings}
    content = {**usual, **content, **inner, "architectures": ["LlamaForCausalLM"]}
    fields = Fields(content, f"{folder}: config.json")
    layer = parse_config(content)
    tensors = {name for file in weight_files(folder) for name in read_header(file)}
    has_embedding = "embed_tokens.weight" in tensors
    if layer.num_layers != 1:
        raise fields.error("num_hidden_layers", "1: a head with several layers is not supported")
    if layer.quantization is not None:
        raise fields.error("quantization_config", "absent: a head that is quantized is not supported")
    if layer.vocab_size != model.vocab_size:
        raise fields.error("vocab_size", f"that of the model ({model.vocab_size})")
    if layer.hidden_size != model.hidden_size and not has_embedding:
        raise fields.error(
            "hidden_size", f"that of the model ({model.hidden_size}), whose embed_tokens.weight it takes"
        )
    only = next((name for name in _LAYERS if any(each.startswith(f"{name}.") for each in tensors)), _LAYERS[0])
    names = LoneLayer(embedding="embed_tokens", final_norm="norm", only=only)
    return Eagle3Config(
        replace(layer, names=names, tie_word_embeddings=False),
        _taps(fields, model.num_layers),
        fields.count("draft_vocab_size", layer.vocab_size, layer.vocab_size),
        has_embedding,
        fields.flag("norm_before_residual", False),
    )


def _object(fields: Fields, name: str) -> Mapping[str, Any]:
    """The object in a field; empty where there is none."""
    found = fields.raw(name)
    if found is not None and not isinstance(found, dict):
        raise fields.error(name, "an object")
    return found or {}


def _taps(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """The layers that the file names, or the usual ones. Within `eagle_config` a number is that of the layer behind
    which the stream is read; elsewhere that of the one before which it is."""
    inner = _object(fields, "eagle_config")
    if inner.get("use_aux_hidden_state") is False:
        raise fields.error("eagle_config", "without use_aux_hidden_state false: heads read three layers")
    name, found, behind = "eagle_aux_hidden_state_layer_ids", fields.raw("eagle_aux_hidden_state_layer_ids"), 0
    if found is None and inner.get(name) is not None:
        found, behind = inner[name], 1
    if found is None:
        found = [2, num_layers // 2, num_layers - 3]
    places = found if isinstance(found, list) else []
    taps = tuple(place + behind for place in places if isinstance(place, int))
    if len(taps) != _NUM_TAPS or not all(0 <= tap <= num_layers for tap in taps):
        raise ModelLoadError(f"eagle3: {name} must name {_NUM_TAPS} layers of the model's {num_layers}, got {found!r}")
    return taps


@dataclass(frozen=True)
class MtpConfig:
    """`layer`: of the one layer, by the names of the model's own checkpoint. The others are names of tensors without
    their ending: norms of the embedding and of the hidden state, the matrix that brings both together. `begin`: what
    the names of all of its tensors begin with. `copies`: names, after that, of tensors that repeat the model's."""

    layer: ModelConfig
    embedding_norm: str
    hidden_norm: str
    projection: str
    begin: str
    copies: tuple[str, ...] = ()


def mtp_config(model: ModelConfig) -> MtpConfig:
    """The first layer for further tokens that the checkpoint of `model` has. Raises `ModelLoadError`."""
    make = _MTP.get(model.architecture)
    if make is None:
        raise ModelLoadError(
            f"mtp: {model.architecture} has no layers that predict further tokens; models with some: {', '.join(_MTP)}"
        )
    return make(model)


def _behind_the_layers(model: ModelConfig) -> MtpConfig:
    if not model.num_draft_layers:
        raise ModelLoadError("mtp: config.json: num_nextn_predict_layers is 0, so there is no layer for further tokens")
    begin = model.names.layer(model.num_layers)
    return MtpConfig(
        _one_layer(model, begin, f"{begin}.shared_head.norm"),
        f"{begin}.enorm",
        f"{begin}.hnorm",
        f"{begin}.eh_proj",
        f"{begin}.",
        ("embed_tokens.weight", "shared_head.head.weight"),
    )


def _beside_the_layers(model: ModelConfig) -> MtpConfig:
    return MtpConfig(
        _one_layer(model, "mtp.layers.0", "mtp.norm"),
        "mtp.pre_fc_norm_embedding",
        "mtp.pre_fc_norm_hidden",
        "mtp.fc",
        "mtp.",
    )


_MTP: Mapping[str, Callable[[ModelConfig], MtpConfig]] = {
    "DeepseekV3ForCausalLM": _behind_the_layers,
    "Glm4MoeForCausalLM": _behind_the_layers,
    "Qwen3NextForCausalLM": _beside_the_layers,
}


def _one_layer(model: ModelConfig, only: str, final_norm: str) -> ModelConfig:
    """A model of one layer that attends, and has experts if the others have."""
    names = {name: value for name, value in vars(model.names).items() if name not in ("only", "final_norm")}
    return replace(
        model,
        num_layers=1,
        num_draft_layers=0,
        windows=(None,),
        layer_ropes=("main",),
        names=LoneLayer(**names, final_norm=final_norm, only=only),
        experts=None if model.experts is None else replace(model.experts, sparse_layers=(True,)),
        states=None if model.states is None else replace(model.states, layers=(False,)),
    )
