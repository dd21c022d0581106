from __future__ import annotations

import json
import sys

import pytest

from program.process import emit, report_errors
from wire.errors import InvalidSetting


def test_a_program_that_listens_gets_json(capsys: pytest.CaptureFixture[str]) -> None:
    emit(event="ready", role="decode", address="http://127.0.0.1:1")
    assert json.loads(capsys.readouterr().out) == {"event": "ready", "role": "decode", "address": "http://127.0.0.1:1"}


def test_a_person_gets_a_bar_and_words(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    emit(event="loading", role="decode", done=5_000_000, total=10_000_000)
    emit(event="loading", role="decode", done=10_000_000, total=10_000_000)
    emit(event="ready", role="router", address="http://127.0.0.1:1", control_address="tcp://127.0.0.1:2")
    half, rest = capsys.readouterr().out.split("\r")[1:]
    assert half == "loading weights [###############...............] 5 of 10 MB"
    assert rest.splitlines() == [
        "loading weights [##############################] 10 of 10 MB",
        "router ready at http://127.0.0.1:1, nodes join with --router tcp://127.0.0.1:2",
    ]


def test_an_error_is_one_line_and_a_status(capsys: pytest.CaptureFixture[str]) -> None:
    def run() -> None:
        raise InvalidSetting("--port 1 is taken")

    assert report_errors(run) == 1
    assert capsys.readouterr().err == "error: --port 1 is taken\n"
