"""`baton bench sweep`: the highest rate at which a configuration still serves well enough, its goodput.

The rate is doubled until too few requests meet the goals of `--goodput`, then narrowed down. Configurations take turns,
so that what else uses the machine meets all of them. An interrupted sweep goes on when it is started again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from bench.documents import Configuration, SweepDocument
from bench.serve.settings import parse_slo
from bench.sweep.report import report
from bench.sweep.run import carry_out, conclude, open_searches
from bench.sweep.settings import SweepSettings, check
from bench.targets.session import read_session


def main(arguments: Sequence[str]) -> int:
    """Search, save and print; 1 when no rate of some configuration was good enough. Raises `BatonError`."""
    session = read_session(
        "sweep",
        "--target NAME=... --goodput METRIC:MS ...",
        "Find the highest request rate that each configuration serves within its goals.",
        arguments,
        SweepSettings,
    )
    settings, goals = session.settings, parse_slo(session.serve.goodput)
    check(settings, goals)
    line_up = session.line_up()
    configurations = [Configuration(**asdict(target), points=[]) for target in session.described()]
    document = session.begun(
        SweepDocument(facts=session.facts, slo=goals, attainment=settings.attainment, configurations=configurations)
    )
    if open_searches(document, settings):
        with line_up:
            carry_out(document, session, line_up, session.measure())
    else:
        session.say(f"everything is in {session.path} already: --no-resume measures again")
    conclude(document, settings)
    print(report(document))
    return 0 if all(each.goodput_rate is not None for each in document.configurations) else 1
