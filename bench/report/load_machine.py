"""What files say about the machine: facts, results of `bench limits` and of `bench kv`. Knows no served request."""

from __future__ import annotations

from typing import Any

from bench.facts import Facts
from bench.kv.measure import Case, Limits, Results
from bench.report.reader import Reader
from bench.report.results import Ceiling, KvFile, LimitRatio, LimitsFile


def facts_of(reader: Reader) -> Facts:
    """The surroundings of a run. Raises `InvalidSetting`."""
    versions = reader.child("versions").members
    return Facts(
        time=reader.text("time"),
        command=reader.text("command"),
        commit=reader.text("commit"),
        cpu_model=reader.text("cpu_model"),
        num_cores=int(reader.number("num_cores")),
        cores=tuple(int(core) for core in reader.numbers("cores")),
        memory_bytes=int(reader.number("memory_bytes")),
        kernel=reader.text("kernel"),
        load_average=reader.number("load_average"),
        versions={str(name): str(version) for name, version in versions.items()},
    )


def joined(value: Any) -> str:
    """A text, or texts in a list, on one line; "" for null."""
    if isinstance(value, dict):
        return "; ".join(f"{name}: {joined(inner)}" for name, inner in value.items())
    if isinstance(value, list):
        return ", ".join(map(joined, value))
    return "" if value is None else str(value)


def limits_of(name: str, reader: Reader) -> LimitsFile:
    """A result of `baton bench limits`. Raises `InvalidSetting`."""
    return LimitsFile(
        name=name,
        facts=facts_of(reader.child("facts")),
        setup=reader.child("setup").members if "setup" in reader.members else {},
        ceilings=tuple(
            Ceiling(
                name=found.text("name"),
                value=found.number("value"),
                unit=found.text("unit"),
                spread=found.number_or_none("spread"),
                note=found.text_or("note"),
            )
            for found in reader.children("ceilings")
        ),
        ratios=tuple(
            LimitRatio(
                name=found.text("name"),
                case=found.text_or("case"),
                value=found.number_or_none("value"),
                low=found.number_or_none("low"),
                high=found.number_or_none("high"),
                unit=found.text_or("unit"),
                goal=joined(found.members.get("goal")),
                is_noisy=bool(found.members.get("noisy")),
                note=found.text_or("note"),
            )
            for found in reader.children("ratios")
        ),
        notes=(*reader.texts("failures"), *reader.texts("notes")),
    )


def handoffs_of(name: str, reader: Reader) -> KvFile:
    """A result of `baton bench kv`. Raises `InvalidSetting`."""
    limits = reader.child("limits")
    samples = {key: limits.numbers(key) for key in limits.members if key != "num_bytes"}
    try:
        found = Limits(int(limits.number("num_bytes")), **samples)
    except TypeError:
        raise limits.wrong("limits", "what `baton bench kv` writes") from None
    return KvFile(
        name=name,
        facts=facts_of(reader.child("facts")),
        results=Results(
            limits=found,
            cases=[_case(case) for case in reader.children("cases")],
            small_cases=[_case(case) for case in reader.children("small_cases")],
            failures={str(key): str(value) for key, value in reader.child("failures").members.items()},
        ),
        missing={str(key): str(value) for key, value in reader.child("missing").members.items()},
    )


def _case(reader: Reader) -> Case:
    return Case(
        transport=reader.text("transport"),
        checksum=reader.text("checksum"),
        block_bytes=int(reader.number("block_bytes")),
        num_blocks=int(reader.number("num_blocks")),
        memcpy_s=reader.numbers("memcpy_s"),
        wall_s=reader.numbers("wall_s"),
        let_go_s=reader.numbers("let_go_s"),
        bare_nixl_s=reader.numbers("bare_nixl_s"),
    )
