"""The table of docs/models.md: which architectures run, what they are made of, and what of them was compared.

Owns its form. The facts come from the registry and from the models that `test_families.py` compares with transformers.
The page is written by hand around a pair of marks, between which the table is; to bring it up to date:

    python -m tests.engine.models.models_page docs/models.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from baton.engine.models.family import Family
from baton.engine.models.registry import ARCHITECTURES
from tests.engine.models.families import COMMON, FAMILIES

BEGIN, END = "<!-- architectures: begin -->\n", "<!-- architectures: end -->\n"
_BLOCKS = {
    "pre": "norms before",
    "post": "norms after",
    "sandwich": "norms before and after",
    "parallel": "attention beside the MLP",
    "parallel_two_norms": "attention beside the MLP or before it",
}
_NORMS = {
    "rms": "RMS norm",
    "offset_rms": "RMS norm of 1 + weight",
    "layer": "layer norm",
    "layer_without_bias": "layer norm without bias",
}
_WINDOWS = {
    "never": "",
    "every_layer": "a window in all layers",
    "by_layer_type": "windows by layer",
    "by_pattern": "windows by layer",
}
_ROPES = {
    "all": "",
    "local": "a rope of their own for layers with a window",
    "windows_only": "no rope in layers without a window",
    "no_rope_layers": "layers without rope",
}
_STATES = {"none": "", "lfm2": "short convolutions or attention", "qwen3_next": "gated delta nets or gated attention"}
_QK_NORMS = {"none": "", "heads": "norm of each head", "whole": "norm over all heads"}


def compared_as(family: Family) -> list[str]:
    """The models of `FAMILIES` that are of this architecture, and what is particular in them."""
    found = []
    for name, (model_type, changes) in FAMILIES.items():
        if MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type] == family.architecture:
            fields = ", ".join(field for field in changes if field not in COMMON or field == "max_position_embeddings")
            found.append(f"{name} ({fields})" if fields else name)
    return found


def parts_of(family: Family) -> Iterator[str]:
    """What a model of this family is made of, in words."""
    yield _BLOCKS[family.block]
    yield _NORMS[family.norm]
    if family.has_latents:
        yield "latent attention"
    yield _STATES[family.states]
    yield _QK_NORMS[family.qk_norm]
    if family.names.qkv:
        yield "q, k and v in one matrix"
    yield _WINDOWS[family.window_rule]
    yield "learned positions" if family.names.positions else _ROPES[family.rope_rule]
    yield "rotated neighbours" if family.is_interleaved else ""
    yield "a part of each head rotated" if family.may_rotate_partly else ""
    yield "caps of scores and logits" if "attn_logit_softcapping" in family.defaults else ""
    yield "sinks" if family.names.sinks else ""
    yield "plain MLP" if family.mlp == "plain" else ""
    yield "experts" if family.experts is not None else ""
    yield f"weights in {family.quantization}" if family.quantization else ""


def table() -> str:
    """The part of the page between the marks. Raises `ValueError` for an architecture that nothing compares."""
    rows = ["| architecture | made of | compared as | only with |", "|---|---|---|---|"]
    for family in ARCHITECTURES.values():
        compared = compared_as(family)
        if not compared:
            raise ValueError(f"no model of {family.architecture} is compared with transformers")
        only = ", ".join(f"`{name}`: {value}" for name, value in family.refused.items())
        made_of = "; ".join(part for part in parts_of(family) if part)
        rows.append(f"| `{family.architecture}` | {made_of} | {'; '.join(compared)} | {only} |")
    return "\n".join(rows) + "\n"


def with_table(page: str) -> str:
    """`page` with the table as it is now."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{table()}{END}{after}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_table(path.read_text()))
