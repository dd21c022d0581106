"""`baton bench serve`: latency, throughput and goodput of a server that speaks the OpenAI API, under load.

Flags, printed block and result file are those of `vllm bench serve`, so what reads its output reads this.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from bench.arguments import parse_settings
from bench.serve.measure import run_serve_benchmark
from bench.serve.report import report
from bench.serve.result import as_json, prepare_folder, result_path, write_result
from bench.serve.settings import ServeBenchSettings, shown_families, shown_percentiles
from bench.workload.dataset_settings import DatasetSettings


def main(arguments: Sequence[str]) -> int:
    """Measure, print, and write the file that is asked for; 1 when every request failed. Raises `BatonError`."""
    parser = argparse.ArgumentParser(
        prog="baton bench serve",
        usage="baton bench serve [options]",
        description="Benchmark a running server: latency, throughput and goodput under load.",
        allow_abbrev=False,
    )
    settings, dataset = parse_settings(parser, arguments, ServeBenchSettings, DatasetSettings)
    prepare_folder(settings)
    result = run_serve_benchmark(settings, dataset, say=_say)
    print(report(result.summary, shown_families(settings), shown_percentiles(settings)))
    path = result_path(settings, result.summary)
    if path is not None:
        write_result(path, as_json(result, settings.save_detailed), is_appended=settings.append_result)
        _say(f"result in {path}")
    return 0 if result.summary["completed"] else 1


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
