"""`baton bench kv`: what the handoff of KV blocks costs on this machine.

For each transport and several sizes, two node processes hand blocks over with everything the product does except
computing them, in turns with a plain copy of as many bytes. See `bench.kv.measure`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.arguments import parse_settings
from bench.facts import collect_facts
from bench.kv.measure import measure
from bench.kv.report import as_json, report
from bench.kv.settings import KvBenchSettings, plan
from engine.api.errors import InvalidSetting

_PACKAGES = ("baton-serve", "numpy", "pyzmq", "xxhash", "nixl", "torch")


def main(arguments: Sequence[str]) -> int:
    """Measure and print; 1 when something that was to be measured failed. Raises `BatonError`."""
    settings = _parse(arguments)
    planned = plan(settings)
    for path in (settings.json, settings.plot):
        if path and not Path(path).absolute().parent.is_dir():
            raise InvalidSetting(f"{path}: there is no such folder")
    facts = collect_facts(shlex.join(["baton", "bench", "kv", *arguments]), _PACKAGES)
    results = measure(planned, _say)
    print(report(facts, results, planned.missing, as_markdown=settings.markdown))
    if settings.json:
        _write(settings.json, json.dumps(as_json(facts, results, planned.missing), indent=1) + "\n")
    if settings.plot and results.cases:
        from bench.kv.plot import save_plot  # matplotlib is slow to import and only needed here

        save_plot(results.cases, settings.plot, f"{facts.cpu_model}, {facts.time}, commit {facts.commit or 'unknown'}")
    return 1 if results.failures else 0


def _parse(arguments: Sequence[str]) -> KvBenchSettings:
    parser = argparse.ArgumentParser(
        prog="baton bench kv",
        description="Measure handoffs of KV blocks between two processes, in turns with a plain copy.",
        allow_abbrev=False,
    )
    settings: KvBenchSettings
    (settings,) = parse_settings(parser, arguments, KvBenchSettings)
    return settings


def _say(text: str) -> None:
    print(f"measuring: {text}", file=sys.stderr, flush=True)


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise InvalidSetting(f"--json {path}: {error.strerror}") from None
