"""`baton bench limits`: what this machine can do at most, and how close an engine of Baton comes.

Ceilings (copying, reading, multiplying) are measured in turns with the part of the engine that they limit, in the same
run, so that the ratios say something on a machine that others use too. All of it happens in one process of its own
(`baton.bench.limits.engine_process`), which has ended when the figures are shown. What a handoff takes beyond a copy,
and a message beside it, is what `baton bench kv` measures.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict

from baton.bench.arguments import parse_alone, require_folder, say, write_json
from baton.bench.child import Child
from baton.bench.documents import LimitsDocument, ResultFile
from baton.bench.facts import as_lines, collect_facts
from baton.bench.limits.result import CEILING_NAMES, MEANINGS, Ceiling, LimitsSettings, Ratio
from baton.bench.report.document import as_text
from baton.bench.report.sections import section_of
from baton.wire.errors import BatonError

_DESCRIPTION = "Measure this machine's ceilings and how close an engine of Baton comes to them, in turns."
_PACKAGES = ("baton-serve", "numpy", "torch")
_ENGINE = "baton.bench.limits.engine_process"
_START_S = 300.0


def main(arguments: Sequence[str]) -> int:
    """Measure and print; 1 when something that was to be measured failed. Raises `BatonError`."""
    settings = parse_alone("baton bench limits", _DESCRIPTION, arguments, LimitsSettings)
    settings.check()
    require_folder(settings.json)
    facts = collect_facts(shlex.join(["baton", "bench", "limits", *arguments]), _PACKAGES)
    document = LimitsDocument(facts=facts, setup=settings.setup)
    try:
        engine_limits(settings, document, say)
    except BatonError as error:  # what was measured before it stays
        document.failures.append(str(error))
    print(report(document))
    if settings.json:
        write_json(settings.json, asdict(document))
    return 1 if document.failures else 0


def report(document: LimitsDocument) -> str:
    """For a terminal, with what the ratios mean."""
    section = section_of(ResultFile("limits", document))
    meanings = ((name, MEANINGS[name]) for name in dict.fromkeys(ratio.name for ratio in document.ratios))
    return f"{as_lines(section.conditions)}\n\n{as_text(section, *section.tables)}\n\n{as_lines(meanings)}"


def engine_limits(settings: LimitsSettings, found: LimitsDocument, say: Callable[[str], None]) -> None:
    """Measure what the settings name. Raises `RequestFailed`."""
    wanted = settings.names
    say("building the engine")
    with Child(_ENGINE, asdict(settings)) as engine:
        engine.hear(_START_S)
        for name in wanted:
            for case in _cases(name, settings):
                say(", ".join([name, *(f"{size} {number}" for size, number in case.items())]))
                found.ratios.append(Ratio(**engine.ask(name, **case)))
        ceilings = engine.ask("ceilings", names=[name for name in CEILING_NAMES if name in wanted])
        found.ceilings.extend(Ceiling(**ceiling) for ceiling in ceilings)


def _cases(name: str, settings: LimitsSettings) -> list[dict[str, int]]:
    """What a ratio is measured for; a ceiling is taken beside the ratios that need it."""
    if name in CEILING_NAMES:
        return []
    if name != "decode_bw_ratio":
        return [{}]
    lengths, sizes = settings.context_lens, settings.batch_sizes
    return [{"batch": batch, "context": length} for length in lengths for batch in sizes]
