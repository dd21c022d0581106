"""`baton bench plan`: the latencies of a load on one node, on a split, and on a split with goals, computed.

The scheduler, the cost model, the routing and the placement are those that serve; steps take what nodes have found out
about theirs (`baton:step_cost_seconds` of their `/metrics`). So a question like "which goals, how many prefill nodes"
is answered in seconds and without noise. What is left out: tokenizing, the client, the router's CPU, and the cores that
nodes share. `docs/benchmarks.md` compares its answers with measurements.
"""

from __future__ import annotations

import math
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from bench.arguments import parse_settings, require_at_least
from bench.plan.simulated_node import NodeShape
from bench.plan.simulation import Deployment, PlannedRequest, Simulation
from bench.report.document import aligned
from bench.runs import METRICS, Run
from bench.serve.arrivals import from_trace, poisson_or_gamma
from bench.serve.metrics import summarise
from bench.targets.line_up import parse_rates
from bench.workload.dataset_settings import AZURE, MOONCAKE, DatasetSettings
from bench.workload.passages import bare_vocabulary
from bench.workload.registry import make_workload
from program.command_line import CommandParser
from program.settings import setting
from router.goals import Goals
from wire.errors import InvalidSetting
from wire.step_cost import StepCost

_FAMILY = "baton:step_cost_seconds"
_TIMEOUT_S = 5.0
_MAX_BYTES = 2**22
_VOCABULARY = 32_000
_PERCENTILES = (50.0, 99.0)


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """What is planned, beside the load."""

    prefill_cost: str = setting("", "metrics of a prefill node: their URL, or a file with them; needed", metavar="FROM")
    decode_cost: str = setting("", "metrics of a decode node; empty: as the prefill node's", metavar="FROM")
    one_cost: str = setting("", "metrics of a node that computes everything; empty: leave one node out", metavar="FROM")
    prefill: int = setting(1, "prefill nodes of the split")
    decode: int = setting(1, "decode nodes of the split")
    goal_ttft_ms: float = setting(500.0, "goal for the first token")
    goal_tpot_ms: float = setting(50.0, "goal between two tokens")
    rates: tuple[str, ...] = setting(("1", "2", "4", "8"), "requests per second, inf: all at once; not for traces")
    max_num_seqs: int = setting(64, "requests computed together in a step")
    max_num_batched_tokens: int = setting(512, "token budget of a step")
    num_blocks: int = setting(8192, "blocks of 16 tokens of each node")
    transfer_us_per_token: float = setting(1.0, "of a handoff, after the prompt was computed")


def main(arguments: Sequence[str]) -> int:
    """Compute and print. Raises `InvalidSetting`."""
    parser = CommandParser(prog="baton bench plan", description="Compute what goals and nodes would do with a load.")
    settings, dataset = parse_settings(parser, arguments, PlanSettings, DatasetSettings)
    require_at_least(settings, prefill=1, decode=1, goal_ttft_ms=0, goal_tpot_ms=0, num_blocks=1, max_num_seqs=1)
    candidates = deployments(settings)
    for pace, requests in loads(settings, dataset):
        print(f"\n{pace}, {len(requests)} requests; computed, not measured\n")
        print(table(candidates, requests, settings), flush=True)
    return 0


def deployments(settings: PlanSettings) -> dict[str, Deployment]:
    """What is compared, by name. Raises `InvalidSetting`."""
    if not settings.prefill_cost:
        raise InvalidSetting("--prefill-cost is needed: the URL of a prefill node's /metrics, or a file with them")
    prompts = read_cost(settings.prefill_cost)
    decodes = read_cost(settings.decode_cost) if settings.decode_cost else prompts
    goals = Goals(settings.goal_ttft_ms / 1000, settings.goal_tpot_ms / 1000)

    def shape(cost: StepCost, goal_tpot_s: float = 0.0) -> NodeShape:
        cost = cost.with_prompts_of(prompts)
        sizes = settings.max_num_seqs, settings.max_num_batched_tokens, settings.num_blocks
        return NodeShape(cost, *sizes, goal_tpot_s)

    prefills = [shape(prompts)] * settings.prefill
    transfer_s = settings.transfer_us_per_token / 1e6
    found = {
        "split": Deployment(prefills, [shape(decodes)] * settings.decode, None, token_transfer_s=transfer_s),
        "with goals": Deployment(
            prefills, [shape(decodes, goals.tpot_s)] * settings.decode, goals, token_transfer_s=transfer_s
        ),
    }
    if settings.one_cost:
        found = {"one node": Deployment([], [shape(read_cost(settings.one_cost))], None), **found}
    return found


def loads(settings: PlanSettings, dataset: DatasetSettings) -> list[tuple[str, list[PlannedRequest]]]:
    """Each load with its name. Raises `InvalidSetting`."""
    conversations = make_workload(dataset, bare_vocabulary(_VOCABULARY)).conversations
    if any(len(each.turns) > 1 for each in conversations):
        raise InvalidSetting("a plan has no conversations of several turns: what a model answers is not known")
    if dataset.dataset_name in (MOONCAKE, AZURE):
        offsets = {"as the trace says": from_trace(conversations, dataset.time_scale, dataset.spread_s, dataset.seed)}
    else:
        offsets = {
            "all at once" if rate == math.inf else f"{rate:g} requests/s": poisson_or_gamma(
                len(conversations), rate, 1.0, dataset.seed
            )
            for rate in parse_rates(settings.rates)
        }
    turns = [each.turns[0] for each in conversations]
    return [
        (
            pace,
            [PlannedRequest(at, turn.token_ids, turn.num_output_tokens) for at, turn in zip(when, turns, strict=True)],
        )
        for pace, when in offsets.items()
    ]


def table(candidates: dict[str, Deployment], requests: Sequence[PlannedRequest], settings: PlanSettings) -> str:
    """The figures of `baton bench serve` for each deployment."""
    slo = {"ttft": settings.goal_ttft_ms, "tpot": settings.goal_tpot_ms}
    runs = []
    for name, deployment in candidates.items():
        simulation = Simulation(deployment)
        outcomes = simulation.run(requests)
        simulation.check()
        duration_s = max(outcome.end_s for outcome in outcomes)
        runs.append(Run(name, 1, math.inf, summarise(outcomes, duration_s, slo, _PERCENTILES)))
    rows = [[metric.label, *(metric.form(run.number(metric.name)) for run in runs)] for metric in METRICS[:-1]]
    return aligned(("", *candidates), rows)


def read_cost(source: str) -> StepCost:
    """The cost that a node shows. Raises `InvalidSetting`."""
    try:
        if source.startswith(("http://", "https://")):
            with urllib.request.urlopen(source, timeout=_TIMEOUT_S) as answer:
                text = answer.read(_MAX_BYTES).decode()
        else:
            text = Path(source).read_text()
        families = [family for family in text_string_to_metric_families(text) if family.name == _FAMILY]
        parts = {f"{sample.labels['part']}_s": sample.value for family in families for sample in family.samples}
        return StepCost(**parts)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidSetting(f"{source:.200}: no {_FAMILY} of a node: {error}") from None
