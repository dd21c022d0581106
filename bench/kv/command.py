"""`baton bench kv`: what the handoff of KV blocks costs.

For each transport and several sizes, two node processes hand blocks over with everything the product does except
computing them, in turns with a plain copy of as many bytes. See `baton.bench.kv.measure`.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict

from baton.bench.arguments import parse_alone, require_folder, say, write_json
from baton.bench.documents import ResultFile
from baton.bench.facts import as_lines, collect_facts
from baton.bench.kv.measure import KvBenchSettings, KvDocument, measure, plan
from baton.bench.report.document import as_text
from baton.bench.report.sections import section_of

_DESCRIPTION = "Measure handoffs of KV blocks between two processes, in turns with a plain copy."
_PACKAGES = ("baton-serve", "numpy", "pyzmq", "xxhash", "nixl", "torch")


def main(arguments: Sequence[str]) -> int:
    """Measure and print; 1 when something that was to be measured failed. Raises `BatonError`."""
    settings = parse_alone("baton bench kv", _DESCRIPTION, arguments, KvBenchSettings)
    planned = plan(settings)
    require_folder(settings.json)
    facts = collect_facts(shlex.join(["baton", "bench", "kv", *arguments]), _PACKAGES)
    document = KvDocument(facts)
    measure(planned, document, say)
    section = section_of(ResultFile("kv", document))
    print(f"{as_lines(section.conditions)}\n\n{as_text(section, *section.tables)}")
    if settings.json:
        write_json(settings.json, asdict(document))
    return 1 if document.failures else 0
