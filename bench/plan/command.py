"""`baton bench plan`: the latencies of a load on one node and on a split, each with goals and without, computed.

Four ways to use goals are compared: one node, whose steps are bounded (what `baton serve` starts on one device), plain
nodes, mixed nodes whose preferences follow the goals, and the first with `--refuse-late`, or the last one where no
costs of one node are given. A last table and a picture have the share of good requests.

The scheduler, the cost model, the routing and the placement are those that serve; steps take what nodes have found out
about theirs (`baton:step_cost_seconds` of their `/metrics`). So a question like "which goals, how many prefill nodes"
is answered in seconds, without noise or with as much of it as is wanted. What is left out: the client, and what
programs take from each other where they share cores. `docs/benchmarks.md` compares its answers with measurements.
"""

from __future__ import annotations

import math
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from baton.bench.arguments import parse_settings
from baton.bench.plan.simulated_node import NodeShape
from baton.bench.plan.simulation import Deployment, PlannedRequest, Simulation
from baton.bench.plots.lines import GOAL, Line, Panel, Plot, rate_ticks, slo_in_words
from baton.bench.plots.style import as_png, as_svg, looks_of
from baton.bench.report.document import aligned
from baton.bench.runs import METRICS, Run
from baton.bench.serve.arrivals import from_trace, poisson_or_gamma
from baton.bench.serve.metrics import summarise
from baton.bench.serve.settings import parse_slo
from baton.bench.targets.line_up import parse_rates
from baton.bench.workload.dataset_settings import AZURE, MOONCAKE, DatasetSettings
from baton.bench.workload.passages import bare_vocabulary
from baton.bench.workload.registry import make_workload
from baton.router.routing.goals import NO_GOALS, Goals
from baton.runtime.command_line import CommandParser
from baton.runtime.ranges import COUNT, MILLISECONDS, SHARE_OR_NONE
from baton.runtime.settings import setting
from baton.wire.errors import InvalidSetting
from baton.wire.step_cost import StepCost

_DESCRIPTION = (
    "Compute what goals and nodes would do with a load, from the step costs that running nodes have measured. What of "
    "a model fits on which devices is another question, which `baton plan` answers from its config alone."
)
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
    prefill: int = setting(1, "prefill nodes of the split", allowed=COUNT)
    decode: int = setting(1, "decode nodes of the split", allowed=COUNT)
    goal_ttft_ms: float = setting(500.0, "goal for the first token", allowed=MILLISECONDS)
    goal_tpot_ms: float = setting(50.0, "goal between two tokens", allowed=MILLISECONDS)
    goodput: tuple[str, ...] = setting(
        (), "what makes a good request, as for `bench compare`; none: that it meets both goals", metavar="KEY:VALUE"
    )
    rates: tuple[str, ...] = setting(
        ("1", "2", "4", "8"), "requests per second, inf: all at once; of traces: times as fast as they say"
    )
    picture: str = setting("", "file.svg or file.png for a picture of the last table", metavar="FILE")
    max_num_seqs: int = setting(64, "requests computed together in a step", allowed=COUNT)
    max_num_batched_tokens: int = setting(512, "tokens of prompts in a step", allowed=COUNT)
    num_blocks: int = setting(8192, "blocks of 16 tokens of each node", allowed=COUNT)
    transfer_us_per_token: float = setting(1.0, "of a handoff, after the prompt was computed", allowed=MILLISECONDS)
    between_steps_ms: float = setting(
        1.0, "of a node, from the end of a step to the beginning of the next one", allowed=MILLISECONDS
    )
    noise: float = setting(
        0.0, "share by which steps take longer or shorter, about a second on end", allowed=SHARE_OR_NONE
    )
    lend_cores: bool = setting(
        False,
        "nodes lend each other cores as those of `baton serve` do: with its partner's, one takes what --one-cost says",
    )
    max_rest_ms: float = setting(
        20.0, "of a decode node after a step, see `baton serve --help`; if cores are lent", allowed=MILLISECONDS
    )
    router_ms: float = setting(
        3.0, "of the router for a request before it places it, and again for each token", allowed=MILLISECONDS
    )


def main(arguments: Sequence[str]) -> int:
    """Compute and print. Raises `InvalidSetting`."""
    parser = CommandParser(prog="baton bench plan", description=_DESCRIPTION)
    settings, dataset = parse_settings(parser, arguments, PlanSettings, DatasetSettings)
    candidates = deployments(settings)
    rates: list[float] = []
    shares: dict[str, list[float]] = {name: [] for name in candidates}
    for rate, pace, requests in loads(settings, dataset):
        print(f"\n{pace}, {len(requests)} requests; computed, not measured\n")
        runs = [run_of(name, deployment, requests, settings) for name, deployment in candidates.items()]
        print(table(runs), flush=True)
        rates.append(rate)
        for run in runs:
            shares[run.target].append(run.number("slo_attainment") or 0.0)
    print("\nshare of good requests\n")
    rows = [[f"{rate:g}", *(f"{shares[name][place]:.0%}" for name in shares)] for place, rate in enumerate(rates)]
    print(aligned(("rate", *shares), rows))
    if settings.picture:
        draw_shares(Path(settings.picture), rates, shares, slo_of(settings))
    return 0


def deployments(settings: PlanSettings) -> dict[str, Deployment]:
    """What is compared, by name. Raises `InvalidSetting`."""
    if not settings.prefill_cost:
        raise InvalidSetting("--prefill-cost is needed: the URL of a prefill node's /metrics, or a file with them")
    prompts = read_cost(settings.prefill_cost)
    decodes = read_cost(settings.decode_cost) if settings.decode_cost else prompts
    goals = Goals(settings.goal_ttft_ms / 1000, settings.goal_tpot_ms / 1000)

    one = read_cost(settings.one_cost) if settings.one_cost else None
    if settings.lend_cores and one is None:
        raise InvalidSetting("--lend-cores needs --one-cost: what steps take with the cores of both nodes")
    lent = one if settings.lend_cores else None
    rest_s = settings.max_rest_ms / 1000 if settings.lend_cores else 0.0

    def shape(cost: StepCost, own: Goals = NO_GOALS) -> NodeShape:
        cost = cost.with_prompts_of(prompts)
        sizes = settings.max_num_seqs, settings.max_num_batched_tokens, settings.num_blocks
        return NodeShape(cost, *sizes, own, settings.noise, settings.between_steps_ms / 1000)

    def decode_shape(own: Goals = NO_GOALS) -> NodeShape:
        return replace(shape(decodes, own), lent_cost=lent, max_rest_s=rest_s)

    prefills = [replace(shape(prompts), lent_cost=lent)] * settings.prefill
    transfer_s, router_s = settings.transfer_us_per_token / 1e6, settings.router_ms / 1000
    paced = Goals(0.0, goals.tpot_s)
    bound = [decode_shape(paced)] * settings.decode
    with_goals = Deployment(prefills, bound, goals, token_transfer_s=transfer_s, router_s=router_s)
    mixed = [
        [shape(cost, paced)] * number for cost, number in ((prompts, settings.prefill), (decodes, settings.decode))
    ]
    adaptive = replace(with_goals, prefills=mixed[0], decodes=mixed[1], is_mixed=True, adapts=True)
    split = replace(with_goals, decodes=[decode_shape()] * settings.decode, goals=None)
    found = {"split": split, "split with goals": with_goals, "mixed": adaptive}
    if one is not None:
        adaptive = Deployment([], [shape(one, goals)], goals, router_s=router_s)
        plain = replace(adaptive, decodes=[shape(one)], goals=None)
        found = {"one node": plain, **found, "one with goals": adaptive}
        adaptive = replace(adaptive, decodes=[shape(one, paced)])
    return {**found, "refusing": replace(adaptive, refuses_late=True)}


def loads(settings: PlanSettings, dataset: DatasetSettings) -> list[tuple[float, str, list[PlannedRequest]]]:
    """Each load with its rate and its name. Arrivals are those of the round of `baton bench compare` that has this
    seed. Raises `InvalidSetting`."""
    rates = enumerate(parse_rates(settings.rates))
    return [(rate, *_load(rate, replace(dataset, seed=dataset.seed + place))) for place, rate in rates]


def _load(rate: float, dataset: DatasetSettings) -> tuple[str, list[PlannedRequest]]:
    conversations = make_workload(dataset, bare_vocabulary(_VOCABULARY)).conversations
    if any(len(each.turns) > 1 for each in conversations):
        raise InvalidSetting("a plan has no conversations of several turns: what a model answers is not known")
    turns = [each.turns[0] for each in conversations]
    if dataset.dataset_name in (MOONCAKE, AZURE):
        pace = f"{rate:g} times as fast as the trace"
        when = from_trace(conversations, dataset.time_scale / rate, dataset.spread_s, dataset.seed)
    else:
        pace = "all at once" if rate == math.inf else f"{rate:g} requests/s"
        when = poisson_or_gamma(len(conversations), rate, 1.0, dataset.seed)
    timed = zip(when, turns, strict=True)
    return pace, [PlannedRequest(at, turn.token_ids, turn.num_output_tokens) for at, turn in timed]


def slo_of(settings: PlanSettings) -> Mapping[str, float]:
    """What makes a good request, in milliseconds by metric. Raises `InvalidSetting`."""
    return parse_slo(settings.goodput) or {"ttft": settings.goal_ttft_ms, "tpot": settings.goal_tpot_ms}


def run_of(name: str, deployment: Deployment, requests: Sequence[PlannedRequest], settings: PlanSettings) -> Run:
    """The figures of `baton bench serve` for a deployment."""
    simulation = Simulation(deployment)
    outcomes = simulation.run(requests)
    simulation.check()
    duration_s = max(outcome.end_s for outcome in outcomes)
    return Run(name, 1, math.inf, summarise(outcomes, duration_s, slo_of(settings), _PERCENTILES))


def table(runs: Sequence[Run]) -> str:
    """A column for each of the runs of one load."""
    rows = [[metric.label, *(metric.form(run.number(metric.name)) for run in runs)] for metric in METRICS[:-1]]
    return aligned(("", *(run.target for run in runs)), rows)


def draw_shares(
    path: Path, rates: Sequence[float], shares: Mapping[str, Sequence[float]], slo: Mapping[str, float]
) -> None:
    """Write the picture of the last table. Raises `InvalidSetting` when the file cannot be written."""
    looks = looks_of(list(shares))
    lines = [Line(name, looks[name], list(rates), [100 * share for share in found]) for name, found in shares.items()]
    goal = (100 * GOAL, f"{GOAL:.0%} of requests")
    panel = Panel(lines, "rate", "% of requests", y_wanted=goal, x_ticks=rate_ticks(rates), y_top=105)
    figure = Plot(f"Requests within {slo_in_words(slo)}; computed, not measured", [panel]).draw()
    try:
        path.write_bytes(as_svg(figure).encode() if path.suffix == ".svg" else as_png(figure))
    except OSError as error:
        raise InvalidSetting(f"--picture {str(path)!r:.200}: {error.strerror}") from None


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
