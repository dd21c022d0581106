"""`baton bench kv`: what the handoff of KV blocks costs on this machine.

For each transport and several sizes, two node processes hand blocks over with everything the product does except
computing them, in turns with a plain copy of as many bytes. See `bench.kv.measure`.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence

from bench.arguments import parse_alone, require_folder, write_text
from bench.documents import KvDocument, ResultFile
from bench.facts import collect_facts
from bench.kv.measure import KvBenchSettings, measure, plan
from bench.kv.report import as_json, save_plot
from bench.report.document import as_text
from bench.report.sections import section_of

_DESCRIPTION = "Measure handoffs of KV blocks between two processes, in turns with a plain copy."
_PACKAGES = ("baton-serve", "numpy", "pyzmq", "xxhash", "nixl", "torch")


def main(arguments: Sequence[str]) -> int:
    """Measure and print; 1 when something that was to be measured failed. Raises `BatonError`."""
    settings = parse_alone("baton bench kv", _DESCRIPTION, arguments, KvBenchSettings)
    planned = plan(settings)
    require_folder(settings.json)
    require_folder(settings.plot, "--plot")
    facts = collect_facts(shlex.join(["baton", "bench", "kv", *arguments]), _PACKAGES)
    results = measure(planned, lambda text: print(f"measuring: {text}", file=sys.stderr, flush=True))
    parts = (results.limits, results.cases, results.small_cases, results.failures)
    section = section_of(ResultFile("kv", KvDocument(*parts, facts=facts, missing=planned.missing)))
    text = as_text(section, *section.tables)
    print("\n".join([*facts.describe(), "", text if settings.markdown else text.replace("**", "")]))
    if settings.json:
        write_text(settings.json, json.dumps(as_json(facts, results, planned.missing), indent=1) + "\n")
    if settings.plot and results.cases:
        save_plot(results.cases, settings.plot, f"{facts.cpu_model}, {facts.time}, commit {facts.commit or 'unknown'}")
    return 1 if results.failures else 0
