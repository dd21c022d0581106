from __future__ import annotations

import pytest

from launch.child import Exited, Loading, Ready, parse_event


@pytest.mark.parametrize(
    ("line", "event"),
    [
        ('{"event": "ready", "role": "router", "address": "http://h:1", "control_address": "tcp://h:2"}', "http://h:1"),
        ('{"event": "ready", "role": "decode"}', ""),
    ],
)
def test_reads_a_ready_line(line: str, event: str) -> None:
    assert parse_event("child", line) == Ready("child", event)


def test_reads_a_loading_line() -> None:
    assert parse_event("child", '{"event": "loading", "role": "x", "done": 3, "total": 9}') == Loading("child", 3, 9)


def test_reads_a_line_about_graphs() -> None:
    line = '{"event": "loading", "role": "x", "stage": "graphs", "done": 3, "total": 9}'
    assert parse_event("child", line) == Loading("child", 3, 9, "graphs")


@pytest.mark.parametrize("line", ["", "hello", "[1]", "3", '{"event": "loading", "done": "all"}', '{"event": "other"}'])
def test_other_output_is_no_event(line: str) -> None:
    assert parse_event("child", line) is None


@pytest.mark.parametrize(
    ("exited", "words"),
    [
        (Exited("child", 1, "no such model"), "no such model"),
        (Exited("child", 3, ""), "exited with status 3"),
        (Exited("child", -11, ""), "was killed by SIGSEGV"),
        (Exited("child", -99, ""), "was killed by signal 99"),
    ],
)
def test_an_end_is_described(exited: Exited, words: str) -> None:
    assert exited.describe() == words
