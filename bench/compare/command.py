"""`baton bench compare`: the same workload on several targets in turns, and what may be concluded from it.

Targets are measured one after the other in each round, each with the same requests; what else uses the machine meets
all of them. See `bench.compare.verdict` for the rule by which a difference is called one.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.compare.plan import Schedule
from bench.compare.report import report
from bench.compare.run import carry_out, conclude, keep_whole_groups
from bench.compare.settings import CompareSettings, check, rates_of
from bench.documents import CompareDocument
from bench.targets.session import Session, read_session


def main(arguments: Sequence[str]) -> int:
    """Measure, save and print; 1 when a target answered nothing at some rate. Raises `BatonError`."""
    session = read_session(
        "compare",
        "--target NAME=... --target NAME=...",
        "Measure several servers in turns with the same requests, and say what differs beyond noise.",
        arguments,
        CompareSettings,
    )
    check(session.settings)
    line_up = session.line_up()
    document = session.begun(
        CompareDocument(
            facts=session.facts, targets=session.described(), rounds=session.settings.rounds, runs=[], ratios=[]
        )
    )
    schedule = schedule_of(session, len(document.sessions) - 1)
    if steps := schedule.steps(keep_whole_groups(document, schedule)):
        with line_up:
            carry_out(document, steps, session, line_up, session.measure())
    else:
        session.say(f"everything is in {session.path} already: --no-resume measures again")
    conclude(document)
    print(report(document))
    return 0 if all(entry["failed"] < entry["num_requests"] for entry in document.medians) else 1


def schedule_of(session: Session[CompareSettings], num_before: int) -> Schedule:
    """What is to be done after `num_before` interruptions."""
    settings = session.settings
    return Schedule(
        targets=tuple(target.name for target in session.targets),
        rates=rates_of(settings),
        rounds=settings.rounds,
        warmup_rounds=settings.warmup_rounds,
        has_control=settings.control,
        is_one_at_a_time=settings.one_at_a_time,
        seed=session.dataset.seed,
        session=num_before,
    )
