"""How much of a wrong program the suite sees: small changes to the code, one at a time, each with tests that run it.

    python -m tests.mutation --area baton/engine/cache --to /tmp/mutants             # all mutants of an area
    python -m tests.mutation --area kvtransfer --sample 400 --seed 1 --to /tmp/mutants    # --resume after a break
    python -m tests.mutation --area kvtransfer --to /tmp/mutants --survivors   # again, those that were alive
    python -m tests.mutation --to /tmp/mutants --report                        # nothing is run

It uses one core, and a copy of the working tree. `--controls` runs tests on unchanged code as if it were a mutant: what
these "kill" was killed by chance.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path

from tests.mutation.operators import Mutant, mutants_of
from tests.mutation.results import Row, append, equivalents, read, summary
from tests.mutation.trial import Trials, read_trace, trace, working_copy

_SCHEDULES = [
    *(
        f"tests/simulation/test_schedules.py::test_every_stream_is_right_and_nothing_is_left[{n}]"
        for n in (0, 250, 500)
    ),
    "tests/simulation/test_schedules.py::test_nodes_that_do_any_leg_and_change_what_they_prefer_break_no_stream[0]",
    "tests/simulation/test_scenarios.py",
]
_ENGINE = [
    f"tests/engine/test_{name}.py" for name in ("core", "core_asynchronous", "forks", "capacity", "prompt_logprobs")
]
_ROUTER = [
    *(f"tests/router/requests/test_{name}.py" for name in ("inbox", "moves", "output", "relay", "retries")),
    "tests/router/test_prompt_logprobs.py",
]
_LIMITS = "tests/test_limits.py"
_TIERS = (
    *("tiers", "offload", "load_choice", "host_tier", "last_blocks", "block_changes", "fault_log"),
    *("valkey_store", "valkey_server"),
)
_OVER_TIERS = ("tests/engine/test_shared_store.py", "tests/engine/test_offloading.py", "tests/node/kv_events")
_STORED = ("tests/router/test_stored_conversations.py", "tests/router/test_stored_responses.py")
_DRAFTS = ("acceptance", "draft_counts", "draft_depth", "drafts", "row_costs")
_DRAFT_TESTS = (
    *(f"tests/engine/scheduler/test_{name}.py" for name in (*_DRAFTS, "drafts_pay")),
    "tests/engine/test_drafts.py",
)
_SHARING = ("lender", "borrower", "sharing_leg", "notices")
AREAS: dict[str, tuple[list[str], list[str]]] = {
    "baton/engine/cache": (
        ["baton/engine/cache"],
        ["tests/engine/cache", "tests/engine/scheduler", _LIMITS, *_SCHEDULES],
    ),
    "baton/engine/scheduler": (["baton/engine/scheduler"], ["tests/engine/scheduler", *_ENGINE, *_SCHEDULES]),
    "router/requests/output": (
        ["router/requests/output.py", "router/http/resume"],
        ["tests/router/http/resume", *_ROUTER, *_SCHEDULES],
    ),
    "kvtransfer": (["kvtransfer"], ["tests/kvtransfer", _LIMITS, *_SCHEDULES]),
    "kv tiers": (
        [*(f"baton/engine/cache/{name}.py" for name in _TIERS), "baton/engine/cache/disk"],
        ["tests/engine/cache", "tests/engine/scheduler/test_waiting_for_kv.py", _LIMITS, *_OVER_TIERS],
    ),
    "kv sharing": (
        [*(f"baton/node/{name}.py" for name in _SHARING), "baton/node/kv_events"],
        [*(f"tests/node/test_{name}.py" for name in _SHARING), "tests/node/kv_events", _LIMITS],
    ),
    "kv pulls": (
        ["router/routing/prefix_ways.py", "router/routing/pulls.py", "router/requests/prefix_pull.py"],
        ["tests/router/routing", "tests/router/requests/test_prefix_pull.py", "tests/router/health", _LIMITS],
    ),
    "drafts": (
        [
            *(f"baton/engine/scheduler/{name}.py" for name in _DRAFTS),
            *("baton/engine/speculation", "baton/engine/structured/ahead.py", "baton/engine/cache/draft_coverage.py"),
        ],
        [*_DRAFT_TESTS, "tests/engine/speculation", "tests/engine/structured/test_ahead.py", "tests/engine/cache"],
    ),
    "stored responses": (
        ["router/http/stored", "router/http/openai/stored_*.py"],
        ["tests/router/http/stored", "tests/router/http/openai/test_stored_items.py", _LIMITS, *_STORED],
    ),
}
"""By its name, what is changed, and the tests that may see it."""
Place = tuple[str, Mutant]


def main(arguments: Sequence[str]) -> int:
    """Run it; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__.splitlines()[0])
    parser.add_argument("--area", choices=AREAS, action="append", default=[])
    parser.add_argument("--to", type=Path, required=True, help="a folder for results and traces")
    parser.add_argument("--sample", type=int, help="so many mutants of each area; all when not given")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-test-s", type=float, default=25.0, help="seconds of tests for each mutant")
    parser.add_argument("--controls", type=int, default=0, help="so many trials of unchanged code")
    parser.add_argument("--resume", action="store_true", help="go on, with the traces that are there")
    parser.add_argument("--survivors", action="store_true", help="only those that were alive")
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args(arguments)
    options.to.mkdir(parents=True, exist_ok=True)
    for area in () if options.report else options.area:
        _run(area, options)
    return _report(options.to / "results.jsonl")


def _run(area: str, options: argparse.Namespace) -> None:
    with working_copy() as copy:
        files, tests = _files(copy, AREAS[area][0]), AREAS[area][1]
        saved = options.to / f"trace-{area.replace('/', '-').replace(' ', '-')}.json"
        traced = read_trace(saved) if options.resume and saved.exists() else trace(copy, tests, files)
        saved.write_text(json.dumps(asdict(traced)))
        _say(f"{area}: {len(traced.tests)} tests, left out because they failed: {traced.failed}")
        trials = Trials(copy, traced, options.max_test_s)
        try:
            sources = {file: (copy / file).read_bytes() for file in files}
            for file, mutant in _chosen(sources, options):
                before, after = mutant.lines_of(sources[file])
                verdict = asdict(trials.verdict(file, mutant))
                row = Row(area, file, mutant.line, mutant.operator, before, after, **verdict)
                append(options.to / "results.jsonl", row)
                if row.outcome == "survived":
                    _say(str(row))
        finally:
            trials.close()


def _chosen(sources: Mapping[str, bytes], options: argparse.Namespace) -> list[Place]:
    """The mutants to try now: a random sample, in random order, so that a run that is broken off is one too."""
    places = [(file, mutant) for file, source in sources.items() for mutant in mutants_of(source)]
    places.sort(key=lambda place: _chance(options.seed, place[0], *place[1].lines_of(sources[place[0]])))
    controls = [(file, mutant.undone(sources[file])) for file, mutant in places[: options.controls]]
    known = {row.name: row.outcome for row in read(options.to / "results.jsonl")}

    def outcome(place: Place) -> str | None:
        return known.get((place[0], *place[1].lines_of(sources[place[0]])))

    if options.survivors:
        return [place for place in places if outcome(place) == "survived"]
    return controls + [each for each in places[: options.sample] if not (options.resume and outcome(each))]


def _chance(seed: int, *name: str) -> bytes:
    """A random order of mutants, that a change somewhere else in the code leaves alone."""
    return blake2b("\0".join((str(seed), *name)).encode()).digest()


def _files(root: Path, sources: Sequence[str]) -> list[str]:
    paths = [
        path for each in sources for path in (root.glob(each) if each.endswith(".py") else (root / each).rglob("*.py"))
    ]
    return sorted(str(path.relative_to(root)) for path in paths)


def _report(results: Path) -> int:
    rows, accepted = read(results), equivalents()
    for area in AREAS:
        of_area = [row for row in rows if row.area == area]
        if of_area:
            _say(f"{area}: {summary([row for row in of_area if row.operator != 'control'], accepted)}")
    for row in rows:
        if row.name in accepted and row.outcome != "survived":
            _say(f"not equivalent, {row.test} sees it: {row.file}: {row.after}")
    return 0


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
