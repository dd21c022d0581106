"""The experts of a sparse MLP that a `config.json` describes, as one value. Imports no torch.

Owns each family's spelling of them. How tokens choose experts is `baton.engine.models.parts.routing`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from baton.engine.models.config_fields import Fields

MAX_EXPERTS = 1024
MXFP4_GROUP = 32
"""Numbers of a weight in MXFP4 that share a scale, behind each other along the inputs."""
Scoring = Literal["softmax", "sigmoid", "softmax_of_chosen"]
"""What the numbers of routing become before the chosen ones are weights: probabilities over all experts, a probability
for each alone, or probabilities over the chosen ones."""
ExpertStyle = Literal["mixtral", "qwen", "olmoe", "glm", "deepseek_v2", "gpt_oss"]


@dataclass(frozen=True)
class ExpertSettings:
    """Each token goes through `num_chosen` of `num_experts` gated MLPs.

    `sparse_layers`: one entry a layer; the others have one MLP for all tokens. `normalizes`: weights of the chosen sum
    to 1. `has_correction`: experts are chosen by corrected scores. `num_groups`: experts are chosen from the best
    `num_chosen_groups` groups, each as good as its `num_best_of_group` best experts. `has_float32_routing`: whatever
    the model's dtype is. `shared_size`: of the MLP that every token goes through as well, 0 for none.
    """

    num_experts: int
    num_chosen: int
    intermediate_size: int
    sparse_layers: tuple[bool, ...]
    scoring: Scoring = "softmax"
    normalizes: bool = False
    scaling: float = 1.0
    has_correction: bool = False
    num_groups: int = 1
    num_chosen_groups: int = 1
    num_best_of_group: int = 1
    has_float32_routing: bool = False
    shared_size: int = 0
    has_shared_gate: bool = False
    is_clamped: bool = False
    """The gate clamps its inputs at `gate_limit`, and has the slope `gate_slope`; routing and experts have biases."""
    gate_limit: float = 0.0
    gate_slope: float = 0.0
    is_mxfp4: bool = False


def read_experts(style: ExpertStyle, fields: Fields, num_layers: int) -> ExpertSettings:
    """The experts of a family of that `style`. Raises `ModelLoadError`."""
    found = _READERS[style](fields, num_layers)
    if found.num_chosen > found.num_experts:
        raise fields.error("num_experts_per_tok", f"at most the number of experts ({found.num_experts})")
    if found.num_experts % found.num_groups or found.num_chosen_groups > found.num_groups:
        raise fields.error("n_group", f"a divisor of the number of experts ({found.num_experts}), at least topk_group")
    return found


def _mixtral(fields: Fields, num_layers: int) -> ExpertSettings:
    return ExpertSettings(
        num_experts=fields.count("num_local_experts", 8, MAX_EXPERTS),
        num_chosen=fields.count("num_experts_per_tok", 2),
        intermediate_size=fields.count("intermediate_size"),
        sparse_layers=(True,) * num_layers,
        normalizes=True,
    )


def _qwen(fields: Fields, num_layers: int) -> ExpertSettings:
    step = fields.count("decoder_sparse_step", 1)
    dense = set(fields.token_ids("mlp_only_layers"))
    shared = fields.count("shared_expert_intermediate_size") if fields.has("shared_expert_intermediate_size") else 0
    return ExpertSettings(
        num_experts=fields.count("num_experts", None, MAX_EXPERTS),
        num_chosen=fields.count("num_experts_per_tok"),
        intermediate_size=fields.count("moe_intermediate_size"),
        sparse_layers=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)),
        normalizes=fields.flag("norm_topk_prob", False),
        shared_size=shared,
        has_shared_gate=shared > 0,
    )


def _olmoe(fields: Fields, num_layers: int) -> ExpertSettings:
    return ExpertSettings(
        num_experts=fields.count("num_experts", 64, MAX_EXPERTS),
        num_chosen=fields.count("num_experts_per_tok", 8),
        intermediate_size=fields.count("intermediate_size"),
        sparse_layers=(True,) * num_layers,
        normalizes=fields.flag("norm_topk_prob", False),
    )


def _glm(fields: Fields, num_layers: int) -> ExpertSettings:
    size = fields.count("moe_intermediate_size")
    first = fields.index("first_k_dense_replace", 0)
    return ExpertSettings(
        num_experts=fields.count("n_routed_experts", None, MAX_EXPERTS),
        num_chosen=fields.count("num_experts_per_tok"),
        intermediate_size=size,
        sparse_layers=tuple(layer >= first for layer in range(num_layers)),
        scoring="sigmoid",
        normalizes=fields.flag("norm_topk_prob", True),
        scaling=fields.number("routed_scaling_factor", 1.0),
        has_correction=True,
        num_groups=fields.count("n_group", 1),
        num_chosen_groups=fields.count("topk_group", 1),
        num_best_of_group=2,
        has_float32_routing=True,
        shared_size=size * fields.count("n_shared_experts", 1),
    )


def _deepseek_v2(fields: Fields, num_layers: int) -> ExpertSettings:
    size = fields.count("moe_intermediate_size")
    first = fields.index("first_k_dense_replace", 0)
    method = fields.raw("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise fields.error("topk_method", "greedy or group_limited_greedy")
    in_groups = method == "group_limited_greedy"
    return ExpertSettings(
        num_experts=fields.count("n_routed_experts", None, MAX_EXPERTS),
        num_chosen=fields.count("num_experts_per_tok"),
        intermediate_size=size,
        sparse_layers=tuple(layer >= first for layer in range(num_layers)),
        scaling=fields.number("routed_scaling_factor", 1.0),
        num_groups=fields.count("n_group") if in_groups else 1,
        num_chosen_groups=fields.count("topk_group") if in_groups else 1,
        has_float32_routing=True,
        shared_size=size * fields.count("n_shared_experts", 1),
    )


def _gpt_oss(fields: Fields, num_layers: int) -> ExpertSettings:
    return ExpertSettings(
        num_experts=fields.count("num_local_experts", None, MAX_EXPERTS),
        num_chosen=fields.count("num_experts_per_tok", 4),
        intermediate_size=fields.count("intermediate_size"),
        sparse_layers=(True,) * num_layers,
        scoring="softmax_of_chosen",
        is_clamped=True,
        gate_limit=fields.number("swiglu_limit", 7.0),
        gate_slope=fields.number("swiglu_alpha", 1.702),
        is_mxfp4=fields.has("quantization_config"),
    )


_READERS: Mapping[ExpertStyle, Callable[[Fields, int], ExpertSettings]] = {
    "mixtral": _mixtral,
    "qwen": _qwen,
    "olmoe": _olmoe,
    "glm": _glm,
    "deepseek_v2": _deepseek_v2,
    "gpt_oss": _gpt_oss,
}
