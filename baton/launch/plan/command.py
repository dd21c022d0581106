"""`baton plan`: what of a model fits on which ranks, and what a handoff between uneven nodes takes, by its config.

Owns the settings, and how a plan is shown: as text, or with `--json` as one JSON object.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from baton.engine.models.checkpoint import choose_dtype, choose_kv_dtype
from baton.engine.models.config import ModelConfig, load_config, parse_config
from baton.engine.models.config_fields import read_json_object
from baton.engine.models.identity import find_checkpoint
from baton.engine.settings import BATCHED_TOKENS, BLOCK_SIZE, RANKS, RANKS_OR_SAME, SEQUENCES, EngineSettings
from baton.engine.speculation.settings import DraftModelAsked, TextAsked, read_asked
from baton.launch.plan.devices import PlannedDevice, find_device
from baton.launch.plan.handoff import PlannedHandoff, plan_handoff
from baton.launch.plan.node_plan import NodePlanner, PlannedNode, Ranks
from baton.node.settings import MAX_ENGINES
from baton.runtime.command_line import CommandParser
from baton.runtime.ranges import COUNT, COUNT_OR_NONE, SHARE, Range
from baton.runtime.settings import add_flags, check_file_keys, resolve, setting
from baton.wire.errors import BatonError, InvalidSetting

_DESCRIPTION = (
    "Compute from a model's config.json what fits: weights and KV of a rank, the longest context, requests together, "
    "bytes of a handoff and the bandwidth that hides it. Nothing is loaded and nothing is measured, except the rates "
    "of this machine's CPU with --gpu cpu."
)
_AUTO = "auto"
_layout = partial(setting, group="layout")
_limits = partial(setting, group="limits")
_SHOWN_CONTEXTS = tuple(1024 * 4**power for power in range(6))
_GIB, _MIB, _KIB = 2**30, 2**20, 2**10


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """Settings of `baton plan`. Settings that are left out are as in `baton serve`."""

    model: str = setting(
        "",
        "checkpoint folder, config.json or hub id, without weights; empty: the built-in demo model",
        positional=True,
    )
    gpu: str = setting("h200", "device of each rank; cpu: this machine, shared by both nodes", metavar="NAME")
    tp: int = setting(1, "tensor parallel ranks of a node", allowed=RANKS)
    prefill_tp: int = _layout(0, "those of prefill nodes; 0: as --tp", allowed=RANKS_OR_SAME)
    decode_tp: int = _layout(0, "those of decode nodes; 0: as --tp", allowed=RANKS_OR_SAME)
    pp: int = setting(1, "pipeline stages of a node", allowed=RANKS)
    prefill_pp: int = _layout(0, "those of prefill nodes; 0: as --pp", allowed=RANKS_OR_SAME)
    decode_pp: int = _layout(0, "those of decode nodes; 0: as --pp", allowed=RANKS_OR_SAME)
    dp: int = setting(
        1, "nodes of a group, which one command starts (--data-parallel-size)", allowed=Range(1, MAX_ENGINES)
    )
    prefill_dp: int = _layout(0, "those of a group of prefill nodes; 0: as --dp", allowed=Range(0, MAX_ENGINES))
    decode_dp: int = _layout(0, "those of a group of decode nodes; 0: as --dp", allowed=Range(0, MAX_ENGINES))
    context: tuple[int, ...] = setting(
        (), "tokens of a request to show figures for; none: steps up to the largest", allowed=COUNT
    )
    dtype: str = setting(_AUTO, "type of weights and products", choices=(_AUTO, "bfloat16", "float16", "float32"))
    kv_cache_dtype: str = setting(
        _AUTO, "type of stored KV; auto: that of the weights", choices=(_AUTO, "fp8", "fp8_e4m3")
    )
    block_size: int = _limits(16, "tokens per KV block", allowed=BLOCK_SIZE)
    max_model_len: int = setting(
        0, "longest prompt plus output in tokens; 0: the model's own limit", allowed=COUNT_OR_NONE
    )
    max_num_seqs: int = setting(64, "requests computed together in a step", allowed=SEQUENCES)
    max_num_batched_tokens: int = _limits(
        0, "tokens of prompts in a step; 0: 2048 on a GPU, else 512", allowed=BATCHED_TOKENS
    )
    gpu_memory_utilization: float = _limits(0.9, "share of a GPU's memory that a rank may take", allowed=SHARE)
    cpu_memory_utilization: float = _limits(
        0.6, "share of this machine's memory that all ranks may take, on a CPU", allowed=SHARE
    )
    flop_utilization: float = _limits(
        0.5, "share of the device's peak that products reach; 1: the most bandwidth that can be needed", allowed=SHARE
    )
    speculative_config: str = setting(
        "", "as of `baton serve`: weights and KV of a draft model are counted, text needs neither", metavar="JSON"
    )
    json: bool = setting(False, "print one JSON object")


@dataclass(frozen=True, slots=True)
class Concurrency:
    """The limits of decode nodes: how many requests of `context` tokens have room for their KV, and the least time of a
    step of them."""

    context: int
    kv_bytes: int
    num_sequences: int
    step_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that `baton plan` says. `num_prefill` and `num_decode`: nodes of a group."""

    model: str
    architecture: str
    dtype: str
    kv_dtype: str
    device: PlannedDevice
    prefill: PlannedNode
    decode: PlannedNode
    max_context: int
    concurrency: tuple[Concurrency, ...]
    handoffs: tuple[PlannedHandoff, ...]
    num_prefill: int
    num_decode: int


def main(arguments: Sequence[str]) -> int:
    """Compute and print. Raises `BatonError`."""
    parser = CommandParser(prog="baton plan", description=_DESCRIPTION)
    add_flags(parser, PlanSettings)
    flags = parser.parse(arguments)
    if flags.config:
        check_file_keys(flags.config, PlanSettings)
    settings = resolve(PlanSettings, flags, os.environ)
    plan = make_plan(settings)
    print(json.dumps(as_document(plan), indent=1) if settings.json else as_text(plan))
    return 0


def make_plan(settings: PlanSettings) -> Plan:
    """The plan. Raises `InvalidSetting` and `ModelLoadError`, with the side that does not work."""
    config = read_config(settings.model).for_context(settings.max_model_len)
    prefill_ranks = Ranks(settings.prefill_tp or settings.tp, settings.prefill_pp or settings.pp)
    decode_ranks = Ranks(settings.decode_tp or settings.tp, settings.decode_pp or settings.pp)
    num_prefill, num_decode = settings.prefill_dp or settings.dp, settings.decode_dp or settings.dp
    dtype = choose_dtype(settings.dtype, config)
    planner = NodePlanner(
        config,
        find_device(settings.gpu),
        _engine_settings(settings),
        dtype,
        choose_kv_dtype(settings.kv_cache_dtype, dtype),
        num_sharing=num_prefill * prefill_ranks.count + num_decode * decode_ranks.count,
        utilization=settings.flop_utilization,
        draft=_draft(settings),
    )
    prefill = _planned(planner, prefill_ranks, "prefill")
    decode = prefill if decode_ranks == prefill_ranks else _planned(planner, decode_ranks, "decode")
    max_context = min(prefill.max_context, decode.max_context)
    contexts = settings.context or (*(size for size in _SHOWN_CONTEXTS if size < max_context), max_context)
    if max(contexts) > max_context:
        raise InvalidSetting(f"--context {max(contexts)} does not fit: the largest here is {max_context} tokens")
    return Plan(
        settings.model or "the demo model",
        config.architecture,
        dtype,
        planner.kv_dtype,
        planner.device,
        prefill,
        decode,
        max_context,
        tuple(_concurrency(planner, decode, context) for context in contexts),
        tuple(plan_handoff(planner, prefill, decode, context) for context in contexts),
        num_prefill,
        num_decode,
    )


def read_config(model: str) -> ModelConfig:
    """The config of a folder, a file or a hub id. Raises `ModelLoadError`."""
    path = Path(model).expanduser()
    return (
        parse_config(read_json_object(path)) if path.is_file() else load_config(find_checkpoint(model, weights=False))
    )


def _draft(settings: PlanSettings) -> ModelConfig | None:
    asked = read_asked(settings.speculative_config)
    if asked is None or isinstance(asked, TextAsked):
        return None
    if not isinstance(asked, DraftModelAsked):
        raise InvalidSetting("--speculative-config: a plan counts draft models, and no heads, which are a layer or two")
    return read_config(asked.checkpoint).for_context(asked.max_model_len or settings.max_model_len)


def as_document(plan: Plan) -> dict[str, Any]:
    """The plan for programs: bytes, seconds and counts under the names of the fields."""
    found = asdict(plan)
    for side in ("prefill", "decode"):
        node: PlannedNode = getattr(plan, side)
        del found[side]["stages"]
        found[side] |= {"kv_tokens": node.kv_tokens, "num_ranks": node.ranks.count}
    return found


def as_text(plan: Plan) -> str:
    """The plan for people."""
    lines = [
        f"{plan.model}: {plan.architecture}, weights in {plan.dtype}, KV in {plan.kv_dtype}, on {plan.device.name} "
        f"({plan.device.memory_bytes / _GIB:.1f} GiB each). Computed, not measured; times are the best possible ones.",
        *_side("prefill", plan.prefill, plan.num_prefill),
        *_side("decode", plan.decode, plan.num_decode),
        f"largest context: {plan.max_context:,} tokens",
        "",
    ]
    rows = [
        (
            f"{of_decode.context:,}",
            _bytes(of_decode.kv_bytes),
            f"{of_decode.num_sequences:,}",
            f"{of_decode.step_s * 1000:.1f} ms",
            f"{handoff.prompt_s * 1000:,.0f} ms",
            _bytes(handoff.num_bytes),
            f"{handoff.hiding_bytes_per_s / 1e9:.2f} GB/s",
        )
        for of_decode, handoff in zip(plan.concurrency, plan.handoffs, strict=True)
    ]
    names = ("context", "KV of one", "requests that fit", "their step", "prefill", "handoff", "hidden from")
    return "\n".join([*lines, *_aligned((names, *rows)), "", *_remarks(plan)])


def _engine_settings(settings: PlanSettings) -> EngineSettings:
    return EngineSettings(
        block_size=settings.block_size,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        cpu_memory_utilization=settings.cpu_memory_utilization,
    )


def _planned(planner: NodePlanner, ranks: Ranks, role: str) -> PlannedNode:
    try:
        return planner.plan(ranks)
    except BatonError as error:
        raise type(error)(f"a {role} node of --tp {ranks.tensor} and --pp {ranks.stages}: {error}") from None


def _concurrency(planner: NodePlanner, node: PlannedNode, context: int) -> Concurrency:
    num_sequences = node.sequences_at(context)
    together = max(1, min(num_sequences, planner.settings.max_num_seqs))
    num_bytes = round(node.blocks_for(context) * node.block_size * node.kv_bytes_per_token_total)
    return Concurrency(context, num_bytes, num_sequences, planner.decode_s(node, together, context))


def _side(role: str, node: PlannedNode, count: int) -> list[str]:
    ranks = f"{node.ranks.count} rank{'s' * (node.ranks.count > 1)}"
    shape = f"{ranks} (tensor {node.ranks.tensor}, pipeline {node.ranks.stages})"
    group = (
        f"    a group of {count} such nodes: {count * node.ranks.count} ranks, {count * node.kv_tokens:,} tokens of KV"
    )
    return [
        f"{role} node: {shape}; a rank has {_bytes(node.weights_bytes)} of weights, "
        f"{_bytes(node.step_bytes)} for a step of {node.max_step_tokens:,} tokens (estimate), "
        f"{_bytes(node.num_blocks * node.block_size * node.kv_bytes_per_token)} of KV",
        f"    {node.kv_tokens:,} tokens of KV in the node, {node.kv_bytes_per_token / _KIB:.1f} KiB of a token in a "
        f"rank, {node.kv_bytes_per_token_total / _KIB:.1f} KiB in all",
        *([group] if count > 1 else []),
    ]


def _remarks(plan: Plan) -> list[str]:
    first = plan.handoffs[0]
    links = f"{first.num_links} pair{'s' * (first.num_links > 1)} of ranks"
    return [
        f'A handoff goes over {links}; with the bandwidth of "hidden from", over all of them, each chunk is there '
        "before the next one is computed.",
        '"requests that fit": into one node. "their step": one decode step of them, at most --max-num-seqs together.',
    ]


def _bytes(count: float) -> str:
    for unit, size in (("GiB", _GIB), ("MiB", _MIB)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count / _KIB:.1f} KiB"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in rows]
