"""`baton bench limits`: what this machine can do at most, and how close Baton comes.

Ceilings (copying, reading, multiplying, a message) are measured in turns with the part of Baton that they limit, in the
same run, so that the ratios say something on a machine that others use too.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from bench.arguments import parse_settings
from bench.facts import collect_facts
from bench.limits.engine_ratios import engine_limits
from bench.limits.report import report, result_json
from bench.limits.result import Ceiling, Ratio
from bench.limits.settings import LimitsSettings
from bench.limits.system import system_limits
from engine.api.errors import BatonError, InvalidSetting
from engine.models.identity import model_name

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
    settings = _parse(arguments)
    settings.check()
    if settings.json and not Path(settings.json).absolute().parent.is_dir():
        raise InvalidSetting(f"--json {settings.json}: there is no such folder")
    facts = collect_facts(shlex.join(["baton", "bench", "limits", *arguments]), _PACKAGES)
    found = _measure(settings)
    setup = _setup(settings)
    print(report(facts, setup, found.ceilings, found.ratios, found.failures))
    if settings.json:
        content = result_json(facts, setup, found.ceilings, found.ratios, found.failures)
        _write(settings.json, json.dumps(content, indent=1) + "\n")
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


def _parse(arguments: Sequence[str]) -> LimitsSettings:
    parser = argparse.ArgumentParser(
        prog="baton bench limits",
        description="Measure this machine's ceilings and how close Baton comes to them, in turns.",
        allow_abbrev=False,
    )
    settings: LimitsSettings
    (settings,) = parse_settings(parser, arguments, LimitsSettings)
    return settings


def _say(text: str) -> None:
    print(f"measuring: {text}", file=sys.stderr, flush=True)


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise InvalidSetting(f"--json {path}: {error.strerror}") from None
