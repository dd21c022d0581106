"""Heads with random weights, in the formats and with the names in which heads are published."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from baton.engine.models.weight_files import SINGLE_FILE
from tests.checkpoints import write_weights


def make_eagle3(
    folder: Path,
    model: Path,
    *,
    num_rows: int | None = None,
    has_embedding: bool = False,
    layer: str = "midlayer",
    seed: int = 3,
    changes: Mapping[str, Any] | None = None,
) -> dict[str, Tensor]:
    """Write a head for `model` into `folder`, and return its tensors. `num_rows`: of its output layer, if it knows
    fewer tokens."""
    of_model = json.loads((model / "config.json").read_text())
    size, vocab_size = of_model["hidden_size"], of_model["vocab_size"]
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": size,
        "intermediate_size": 112,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
        "vocab_size": vocab_size,
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 2],
        **({} if num_rows is None else {"draft_vocab_size": num_rows}),
        **(changes or {}),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = _eagle3_tensors(config, layer, num_rows or vocab_size, seed)
    if num_rows is not None:
        chosen = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(seed))[:num_rows].sort().values
        tensors["d2t"] = chosen - torch.arange(num_rows)
        tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, chosen, True)
    if has_embedding:
        tensors["embed_tokens.weight"] = torch.randn(vocab_size, size, generator=torch.Generator().manual_seed(seed))
    write_weights(folder, tensors)
    return tensors


def _eagle3_tensors(config: Mapping[str, Any], layer: str, num_rows: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    size, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim", size // heads)
    q, kv = heads * head_dim, config["num_key_value_heads"] * head_dim
    shapes = {
        "fc": (size, 3 * size),
        f"{layer}.self_attn.q_proj": (q, 2 * size),
        f"{layer}.self_attn.k_proj": (kv, 2 * size),
        f"{layer}.self_attn.v_proj": (kv, 2 * size),
        f"{layer}.self_attn.o_proj": (size, q),
        f"{layer}.mlp.gate_proj": (inner, size),
        f"{layer}.mlp.up_proj": (inner, size),
        f"{layer}.mlp.down_proj": (size, inner),
        "lm_head": (num_rows, size),
    }
    norms = ("norm", *(f"{layer}.{name}" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")))
    tensors = {
        f"{name}.weight": torch.randn(shape, generator=generator) * 1.5 / math.sqrt(shape[1])
        for name, shape in shapes.items()
    }
    return tensors | {f"{name}.weight": 1 + 0.2 * torch.randn(size, generator=generator) for name in norms}


def add_mtp(model: Path, like_layer: int, seed: int = 4) -> dict[str, Tensor]:
    """Add the layer for further tokens to a checkpoint, with tensors like those of one of its layers, and return what
    was added."""
    content = json.loads((model / "config.json").read_text())
    tensors = load_file(model / SINGLE_FILE)
    size, generator = content["hidden_size"], torch.Generator().manual_seed(seed)
    is_qwen = content["model_type"] == "qwen3_next"
    begin = "mtp." if is_qwen else f"model.layers.{content['num_hidden_layers']}."
    inner = f"{begin}layers.0." if is_qwen else begin
    of_layer = f"model.layers.{like_layer}."
    added = {
        inner + name.removeprefix(of_layer): torch.randn(tensor.shape, generator=generator) * tensor.std()
        + tensor.mean()
        for name, tensor in tensors.items()
        if name.startswith(of_layer)
    }
    center = 0.0 if is_qwen else 1.0
    norms = (
        ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm") if is_qwen else ("enorm", "hnorm", "shared_head.norm")
    )
    added |= {f"{begin}{name}.weight": center + 0.2 * torch.randn(size, generator=generator) for name in norms}
    both = torch.randn(size, 2 * size, generator=generator) * 1.5 / math.sqrt(2 * size)
    added[f"{begin}{'fc' if is_qwen else 'eh_proj'}.weight"] = both
    copies = {}
    if not is_qwen:
        copies = {
            f"{begin}embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
            f"{begin}shared_head.head.weight": tensors["lm_head.weight"].clone(),
        }
    write_weights(model, {**tensors, **added, **copies})
    if not is_qwen:
        (model / "config.json").write_text(json.dumps({**content, "num_nextn_predict_layers": 1}))
    return added
