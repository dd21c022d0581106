from __future__ import annotations

import json
import sys

import pytest

from baton.runtime.events import GRAPHS, Event, Loading, Ready, emit, parse_event

EVENTS: list[Event] = [
    Ready("router", "http://127.0.0.1:1", control_address="tcp://127.0.0.1:2"),
    Ready("prefill", "http://127.0.0.1:1", peer_address="tcp://127.0.0.1:3"),
    Loading("decode", 3, 9),
    Loading("decode", 3, 9, GRAPHS),
]


@pytest.mark.parametrize("event", EVENTS)
def test_a_program_that_listens_reads_what_was_said(event: Event, capsys: pytest.CaptureFixture[str]) -> None:
    emit(event)
    assert parse_event(capsys.readouterr().out) == event


def test_an_event_is_a_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    emit(Ready("decode", "http://127.0.0.1:1"))
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert json.loads(said).items() >= {"event": "ready", "role": "decode", "address": "http://127.0.0.1:1"}.items()


@pytest.mark.parametrize(
    "line",
    [
        "",
        "hello",
        "[1]",
        "3",
        '{"event": "other"}',
        '{"event": "ready", "role": "x", "address": 1}',
        '{"event": "loading", "role": "x", "done": "all", "total": 1}',
    ],
)
def test_other_output_is_no_event(line: str) -> None:
    assert parse_event(line) is None


def test_a_person_gets_a_bar_and_words(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    emit(Loading("decode", 5_000_000, 10_000_000))
    emit(Loading("decode", 10_000_000, 10_000_000))
    emit(Loading("decode", 6, 6, GRAPHS))
    emit(EVENTS[0])
    half, whole, rest = capsys.readouterr().out.split("\r")[1:]
    assert half == "loading weights [###############...............] 5 of 10 MB"
    assert whole == "loading weights [##############################] 10 of 10 MB\n"
    assert rest.splitlines() == [
        "recording CUDA graphs [##############################] 6 of 6",
        "router ready at http://127.0.0.1:1, nodes join with --router tcp://127.0.0.1:2",
    ]
