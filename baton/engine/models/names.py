"""What the tensors of a family's checkpoints are called, and which of them are published as one. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Names:
    """Names of a checkpoint, those within a layer relative to it. "" where a family has no such tensor.

    `qkv`: queries, keys and values in one matrix, with `qkv_order`: all of each after each other, or head by head.
    `gate_up`: gate and up in one matrix. `is_transposed`: matrices are published [in, out].
    """

    layers: str = "model.layers"
    embedding: str = "model.embed_tokens"
    positions: str = ""
    final_norm: str = "model.norm"
    head: str = "lm_head"
    input_norm: str = "input_layernorm"
    attention: str = "self_attn"
    qkv: str = ""
    qkv_order: Literal["stacked", "by_head"] = "stacked"
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    output: str = "o_proj"
    state: str = ""
    sinks: str = ""
    attention_out_norm: str = ""
    mlp_norm: str = "post_attention_layernorm"
    mlp: str = "mlp"
    gate_up: str = ""
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    mlp_out_norm: str = ""
    routing: str = "gate"
    expert_gate: str = "gate_proj"
    expert_up: str = "up_proj"
    expert_down: str = "down_proj"
    shared: str = "shared_expert"
    is_transposed: bool = False

    def layer(self, number: int) -> str:
        """The name that all tensors of a layer begin with."""
        return f"{self.layers}.{number}"


@dataclass(frozen=True)
class LoneLayer(Names):
    """Names of a model with one layer, whose tensors begin with `only`."""

    only: str = ""

    def layer(self, number: int) -> str:
        """`only`, whatever the number."""
        return self.only


LLAMA = Names()
MIXTRAL = Names(mlp="block_sparse_moe", expert_gate="w1", expert_up="w3", expert_down="w2")
PHI3 = Names(qkv="qkv_proj", gate_up="gate_up_proj")
SANDWICH = Names(
    attention_out_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
)
OLMO2 = Names(
    input_norm="",
    mlp_norm="",
    attention_out_norm="post_attention_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
)
GLM = Names(gate_up="gate_up_proj")
GLM4 = Names(gate_up="gate_up_proj", attention_out_norm="post_self_attn_layernorm", mlp_out_norm="post_mlp_layernorm")
GLM4_MOE = Names(shared="shared_experts")
DEEPSEEK = GLM4_MOE
GPT_OSS = Names(routing="router", sinks="sinks")
ONE_NORM = Names(mlp_norm="")
LFM2 = Names(
    final_norm="model.embedding_norm",
    input_norm="operator_norm",
    q_norm="q_layernorm",
    k_norm="k_layernorm",
    output="out_proj",
    state="conv",
    mlp_norm="ffn_norm",
    mlp="feed_forward",
    gate="w1",
    up="w3",
    down="w2",
)
QWEN3_NEXT = Names(state="linear_attn")
GPT2 = Names(
    layers="transformer.h",
    embedding="transformer.wte",
    positions="transformer.wpe",
    final_norm="transformer.ln_f",
    input_norm="ln_1",
    attention="attn",
    qkv="c_attn",
    output="c_proj",
    mlp_norm="ln_2",
    up="c_fc",
    down="c_proj",
    is_transposed=True,
)
GPT_NEOX = Names(
    layers="gpt_neox.layers",
    embedding="gpt_neox.embed_in",
    final_norm="gpt_neox.final_layer_norm",
    head="embed_out",
    attention="attention",
    qkv="query_key_value",
    qkv_order="by_head",
    output="dense",
    up="dense_h_to_4h",
    down="dense_4h_to_h",
)
