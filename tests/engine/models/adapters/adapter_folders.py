"""Adapters as PEFT publishes them, and the checkpoints that they make of a base: W + scale * B A, in plain torch.

The names of tensors and the fields of the config are those that PEFT 0.21 writes.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from baton.engine.models.weight_files import SINGLE_FILE
from tests.checkpoints import write_weights

RANK, ALPHA = 4, 10
CONFIG: dict[str, object] = {
    "alora_invocation_tokens": None,
    "alpha_pattern": {},
    "base_model_name_or_path": "/somewhere",
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "layer_replication": None,
    "lora_alpha": ALPHA,
    "lora_bias": False,
    "lora_dropout": 0.05,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "peft_type": "LORA",
    "peft_version": "0.21.2",
    "qalora_group_size": 16,
    "r": RANK,
    "rank_pattern": {},
    "target_modules": ["q_proj"],
    "task_type": "CAUSAL_LM",
    "use_dora": False,
    "use_rslora": False,
}
LAYERS = tuple(
    f"model.layers.{layer}.{name}"
    for layer in range(2)
    for name in (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    )
)
"""The matrices of a checkpoint of `tests.checkpoints`."""


def write_adapter(
    folder: Path,
    checkpoint: Path,
    modules: Iterable[str] = LAYERS,
    *,
    seed: int = 1,
    is_transposed: bool = False,
    **config: object,
) -> Path:
    """An adapter of random numbers for these matrices of `checkpoint`. `is_transposed`: the checkpoint's are [in, out].
    `config`: changed fields."""
    base, generator = load_file(checkpoint / SINGLE_FILE), torch.Generator().manual_seed(seed)
    rank = int(str(config.get("r", RANK)))
    tensors: dict[str, torch.Tensor] = {}
    for module in modules:
        num_out, num_in = base[f"{module}.weight"].shape[:: -1 if is_transposed else 1]
        a = torch.randn(rank, num_in, generator=generator) / math.sqrt(num_in)
        b = torch.randn(num_out, rank, generator=generator) * 0.15
        tensors |= {f"base_model.model.{module}.lora_A.weight": a, f"base_model.model.{module}.lora_B.weight": b}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}, indent=2))
    return folder


def merged(
    checkpoint: Path, adapter: Path, into: Path, *, scale: float = ALPHA / RANK, is_transposed: bool = False
) -> Path:
    """A copy of `checkpoint` with what the adapter changes in its weights. `is_transposed`: as in `write_adapter`."""
    shutil.copytree(checkpoint, into)
    tensors, changes = load_file(checkpoint / SINGLE_FILE), load_file(adapter / "adapter_model.safetensors")
    for name, a in changes.items():
        if name.endswith(".lora_A.weight"):
            weight = f"{name.removeprefix('base_model.model.').removesuffix('.lora_A.weight')}.weight"
            change = scale * (changes[name.replace("lora_A", "lora_B")].double() @ a.double())
            base = tensors[weight]
            tensors[weight] = (base.double() + (change.T if is_transposed else change)).to(base.dtype)
    write_weights(into, {name: values.contiguous() for name, values in tensors.items()})
    return into
