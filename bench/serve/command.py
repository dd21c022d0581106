"""`baton bench serve`: latency, throughput and goodput of a server that speaks the OpenAI API, under load.

Flags, printed block and result file are those of `vllm bench serve`, so what reads its output reads this. Owns the
order of things: check settings, ask the servers, make the workload, warm up, send, summarise, and say each doubt about
the result in a sentence. Servers are started elsewhere; the dataset and the client come from their own packages.
Invariants: what is wrong with the settings shows before the first request; no warm-up prompt is a measured one.
"""

from __future__ import annotations

import dataclasses
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Any, cast

from tqdm import tqdm

from baton.bench.arguments import parse_settings, say, write_json
from baton.bench.breakdown import summarise_breakdowns
from baton.bench.client.driver import LoadPlan, LoadRun, client_runner, run_load
from baton.bench.client.endpoint import PromptForm, RequestOptions
from baton.bench.documents import ResultFile, served
from baton.bench.facts import collect_facts
from baton.bench.report.document import as_text
from baton.bench.report.sections import section_of
from baton.bench.runs import rate_as_json
from baton.bench.serve.arrivals import arrivals_of, process_of
from baton.bench.serve.metrics import summarise
from baton.bench.serve.result import RunResult, as_json, prepare_folder, report, result_path
from baton.bench.serve.server import find_server, get_ready, other_prompts, tokenizer_folder, vocabulary_for
from baton.bench.serve.settings import (
    CHAT,
    ServeBenchSettings,
    check,
    extra_body,
    headers,
    parse_slo,
    urls,
    without_secrets,
)
from baton.bench.workload.dataset_settings import RANDOM, DatasetSettings
from baton.bench.workload.registry import make_workload
from baton.runtime.command_line import CommandParser
from baton.runtime.settings import as_flags

MIN_CHUNKS_PER_TOKEN = 0.95
MAX_ZERO_GAP_SHARE = 0.05
MAX_CPU_SHARE = 0.9
MAX_LATE_SHARE = 0.01
MAX_CACHED_SHARE = 0.05
PACKAGES = ("baton-serve", "aiohttp", "uvloop", "numpy", "tokenizers", "torch")
"""Their versions stand beside a result."""
Say = Callable[[str], None]
"""Told what happens next, for people."""


def notes_of(summary: dict[str, Any], load: LoadRun, dataset: DatasetSettings) -> Iterator[str]:
    """The doubts about one run. `summary` is what `baton.bench.serve.metrics.summarise` made of its outcomes."""
    client, num_sent = load.client, len(load.outcomes)
    if (chunks := summary["chunks_per_token"]) is not None and chunks < MIN_CHUNKS_PER_TOKEN:
        yield f"the server sent {chunks:.2f} chunks per token: tokens came together, so ITL says less than TPOT"
    if (share := summary["zero_gap_share"] or 0.0) > MAX_ZERO_GAP_SHARE:
        yield f"{share:.0%} of the chunks came in one piece with the one before: ITL says less than TPOT"
    if client.cpu_share > MAX_CPU_SHARE:
        yield f"the client used {client.cpu_share:.0%} of a core: it may have been the bottleneck"
    if client.num_late > MAX_LATE_SHARE * num_sent:
        yield f"{client.num_late} of {num_sent} requests were sent over 10 ms late: the load was not as planned"
    # prompts of the other datasets may have more in common than a prefix of known length
    num_expected = dataset.random_prefix_len * summary["completed"]
    num_unexpected = (summary["cached_tokens"] or 0) - num_expected if dataset.dataset_name == RANDOM else 0
    if num_unexpected > MAX_CACHED_SHARE * summary["total_input_tokens"]:
        yield "the server had prompts in its cache that should be new: measure with another --seed"
    if num := sum(not outcome.failure and "completion_tokens" not in outcome.usage for outcome in load.outcomes):
        yield f"{num} answers came without usage: their tokens were counted as chunks"
    if summary["failed"]:
        yield f"{summary['failed']} of {num_sent} requests failed and are in no average"


def run_serve_benchmark(settings: ServeBenchSettings, dataset: DatasetSettings, *, say: Say) -> RunResult:
    """Raises `BatonError` when there is nothing to measure."""
    check(settings)
    process_of(settings, dataset)
    # values of headers are left out, because they may be secrets
    command = shlex.join(["baton", "bench", "serve", *as_flags(without_secrets(settings)), *as_flags(dataset)])
    with client_runner() as runner:
        return runner.run(measure(settings, dataset, command, say))


async def measure(settings: ServeBenchSettings, dataset: DatasetSettings, command: str, say: Say) -> RunResult:
    """One run. `command` is what the result says it was made by. Raises `BatonError`."""
    ready_at_s = time.monotonic() + settings.ready_check_timeout_sec
    endpoints = [await find_server(settings, url, ready_at_s) for url in urls(settings)]
    served = endpoints[0].model
    vocabulary = vocabulary_for(settings, served)
    workload = make_workload(dataset, vocabulary)
    offsets_s, arrival = arrivals_of(settings, dataset, workload.prompts)
    options = RequestOptions(
        "chat" if settings.backend == CHAT else cast("PromptForm", settings.prompt_form),
        settings.ignore_eos,
        settings.temperature,
        extra_body(settings),
        headers(settings),
    )
    extra = other_prompts(1 + settings.num_warmups, dataset, workload.prompts, vocabulary)
    await get_ready(settings, endpoints, extra, options, ready_at_s, say)

    num_requests = len(workload.prompts)
    say(f"sending {num_requests} requests to {served}, {arrival['process']}")
    plan = LoadPlan(workload.prompts, offsets_s, settings.max_concurrency, settings.timeout_s)
    with tqdm(total=num_requests, disable=settings.disable_tqdm, unit="req") as bar:
        load = await run_load(endpoints, plan, options, lambda _: bar.update())
    figures = summarise(load.outcomes, load.end_s - load.begin_s, parse_slo(settings.goodput))
    summary = {
        **_identity(settings, dataset, served),
        **figures,
        "client": dataclasses.asdict(load.client),
        "breakdown": summarise_breakdowns(load.outcomes),
        "notes": list(notes_of(figures, load, dataset)),
        "dataset": workload.facts,
        "arrival": arrival,
        "seed": dataset.seed,
        "facts": dataclasses.asdict(collect_facts(command, PACKAGES)),
    }
    return RunResult(summary, load.outcomes)


def _identity(settings: ServeBenchSettings, dataset: DatasetSettings, served: str) -> dict[str, Any]:
    ramp = ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps") if settings.ramp_up_strategy else ()
    return {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": settings.backend,
        "label": settings.label or settings.backend,
        "model_id": served,
        "tokenizer_id": str(tokenizer_folder(settings, served) or ""),
        "num_prompts": dataset.num_prompts,
        "request_rate": rate_as_json(settings.request_rate),
        **{name: getattr(settings, name) for name in ("backend", "burstiness", "max_concurrency", *ramp)},
    }


def main(arguments: Sequence[str]) -> int:
    """Measure, print, and write the file that is asked for; 1 when every request failed. Raises `BatonError`."""
    parser = CommandParser(
        prog="baton bench serve", description="Benchmark a running server: latency, throughput and goodput under load."
    )
    settings, dataset = parse_settings(parser, arguments, ServeBenchSettings, DatasetSettings)
    prepare_folder(settings)
    result = run_serve_benchmark(settings, dataset, say=say)
    section = section_of(ResultFile("serve", served(result.summary, "the result")))
    print(f"{report(result.summary)}\n\n{as_text(section, 'figures', 'breakdown', 'failures')}")
    path = result_path(settings, result.summary)
    if path is not None:
        write_json(path, as_json(result, settings.save_detailed), "--result-filename")
        say(f"result in {path}")
    return 0 if result.summary["completed"] else 1
