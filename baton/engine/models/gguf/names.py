"""What GGUF calls tensors that a checkpoint folder has under other names."""

from __future__ import annotations

import re

_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_OF_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAME = re.compile(r"(?:blk\.(?P<layer>\d{1,6})\.)?(?P<part>[a-z0-9_]+)\.(?P<kind>weight|bias)")


def published_name(name: str) -> str:
    """The name in a checkpoint folder; itself where there is none, which loading then refuses by that name."""
    match = _NAME.fullmatch(name)
    if match is None:
        return name
    layer, part, kind = match["layer"], match["part"], match["kind"]
    if layer is None:
        return f"{_WHOLE[part]}.{kind}" if part in _WHOLE else name
    return f"model.layers.{int(layer)}.{_OF_LAYER[part]}.{kind}" if part in _OF_LAYER else name
