"""`baton bench limits`: what this machine can do at most, and how close Baton comes.

Ceilings (copying, reading, multiplying, a message) are measured in turns with the part of Baton that they limit, in the
same run, so that the ratios say something on a machine that others use too.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from bench.arguments import parse_alone
from bench.facts import collect_facts
from bench.limits.engine_ratios import engine_limits
from bench.limits.report import report, result_json
from bench.limits.result import Ceiling, Ratio
from bench.limits.settings import LimitsSettings
from bench.limits.system import system_limits
from bench.output_file import require_folder, write_text
from engine.models.identity import model_name
from wire.errors import BatonError

_DESCRIPTION = "Measure this machine's ceilings and how close Baton comes to them, in turns."
_PACKAGES = ("baton-serve", "numpy", "torch", "pyzmq", "aiohttp")
_Part: TypeAlias = Callable[[LimitsSettings, Callable[[str], None]], tuple[list[Ceiling], list[Ratio]]]


@dataclass(frozen=True, slots=True)
class _Found:
    """What the parts measured, and a sentence for each that failed."""

    ceilings: list[Ceiling] = field(default_factory=list)
    ratios: list[Ratio] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def main(arguments: Sequence[str]) -> int:
    """Measure and print; 1 when something that was to be measured failed. Raises `BatonError`."""
    settings = parse_alone("baton bench limits", _DESCRIPTION, arguments, LimitsSettings)
    settings.check()
    require_folder(settings.json)
    facts = collect_facts(shlex.join(["baton", "bench", "limits", *arguments]), _PACKAGES)
    found = _measure(settings)
    setup = _setup(settings)
    print(report(facts, setup, found.ceilings, found.ratios, found.failures))
    if settings.json:
        content = result_json(facts, setup, found.ceilings, found.ratios, found.failures)
        write_text(settings.json, json.dumps(content, indent=1) + "\n")
    return 1 if found.failures else 0


def _measure(settings: LimitsSettings) -> _Found:
    """One half that fails leaves the other."""
    found = _Found()
    parts: dict[str, _Part] = {"engine": engine_limits, "system": system_limits}
    for name, measure in parts.items():
        try:
            ceilings, ratios = measure(settings, _say)
        except BatonError as error:
            found.failures.append(f"{name} limits: {error}")
        else:
            found.ceilings.extend(ceilings)
            found.ratios.extend(ratios)
    return found


def _setup(settings: LimitsSettings) -> dict[str, Any]:
    return {
        "model": model_name(settings.model, ""),
        "cores": list(settings.core_ids),
        "threads": settings.num_threads,
        "rounds": settings.num_rounds,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
    }


def _say(text: str) -> None:
    print(f"measuring: {text}", file=sys.stderr, flush=True)
