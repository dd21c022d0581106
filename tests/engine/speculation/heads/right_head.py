"""A model whose next token follows from its last one, and an EAGLE-3 head that knows it.

The layers of the model add next to nothing, so that a hidden state is the embedding of its token, and the output layer
brings each token to another one. The head attends to its own slot alone, where it finds the embedding.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from baton.engine.models.weight_files import SINGLE_FILE
from tests.checkpoints import make_checkpoint, write_weights
from tests.engine.models.heads.published import make_eagle3

NUM_LAYERS = 4


def make_predictable(folder: Path, max_position: int = 512) -> Path:
    """The model; returns its folder."""
    make_checkpoint(folder, "llama", max_position=max_position, changes={"num_hidden_layers": NUM_LAYERS})
    tensors = load_file(folder / SINGLE_FILE)
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] *= 1e-3
    tensors["model.norm.weight"] = torch.ones(64)
    tensors["lm_head.weight"] = _next_of(_apart(tensors), 12.0)
    write_weights(folder, tensors)
    return folder


def make_right_head(folder: Path, model: Path) -> Path:
    """A head whose drafts are right; returns its folder."""
    tensors = make_eagle3(folder, model, changes={"num_key_value_heads": 4, "norm_before_residual": True})
    of_model = load_file(model / SINGLE_FILE)
    size = 64
    identity, nothing = torch.eye(size), torch.full((size, size), 1e-6)
    sharp = torch.cat((3.0 * identity, nothing), dim=1)
    tensors |= {
        "fc.weight": tensors["fc.weight"] * 1e-4,
        "midlayer.self_attn.q_proj.weight": sharp,
        "midlayer.self_attn.k_proj.weight": sharp.clone(),
        "midlayer.self_attn.v_proj.weight": torch.cat((identity, nothing), dim=1),
        "midlayer.self_attn.o_proj.weight": 4.0 * identity,
        "midlayer.mlp.down_proj.weight": tensors["midlayer.mlp.down_proj.weight"] * 1e-4,
        "lm_head.weight": of_model["lm_head.weight"].clone(),
    }
    tensors |= {name: torch.ones(size) for name in tensors if "norm" in name}
    write_weights(folder, tensors)
    return folder


def config_of(head: Path, num_tokens: int = 4) -> str:
    return json.dumps({"method": "eagle3", "model": str(head), "num_speculative_tokens": num_tokens})


def _apart(tensors: dict[str, Tensor]) -> Tensor:
    """Embeddings of one length, which point far apart, put in the place of those of the model."""
    rows = torch.nn.functional.normalize(tensors["model.embed_tokens.weight"], dim=1) * 8.0
    tensors["model.embed_tokens.weight"] = rows
    return rows


def _next_of(embedding: Tensor, sharpness: float) -> Tensor:
    """An output layer by which token t is followed by t + 7, around all but the special ones."""
    rows = torch.full_like(embedding, 1e-3)
    count = len(embedding) - 3
    rows[(torch.arange(count) + 7) % count] = embedding[:count] / 64.0 * sharpness
    return rows
