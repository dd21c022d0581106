from __future__ import annotations

import io

from baton.launch.console import Console
from baton.runtime.events import GRAPHS


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class GoneTerminal(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_loading_is_two_plain_lines_off_a_terminal() -> None:
    stream = io.StringIO()
    console = Console(stream)
    for done in (0, 2_000_000, 4_000_000, 4_000_000):
        console.loading("prefill-0", done, 4_000_000)
    assert stream.getvalue() == "[prefill-0] loading 4.0 MB of weights\n[prefill-0] loaded 4.0 MB of weights\n"


def test_long_loading_says_off_a_terminal_how_far_it_is_and_not_at_every_report() -> None:
    shown = {}
    for interval_s in (0.0, 3600.0):
        stream = io.StringIO()
        console = Console(stream, line_interval_s=interval_s)
        for done in (0, 1_000_000, 3_000_000, 4_000_000):
            console.loading("prefill-0", done, 4_000_000)
        shown[interval_s] = [line.partition("weights")[2] for line in stream.getvalue().splitlines()]
    assert shown == {0.0: ["", ": 25%", ": 75%", ""], 3600.0: ["", ""]}


def test_loading_is_one_bar_over_all_children_on_a_terminal() -> None:
    stream = FakeTerminal()
    console = Console(stream, bar_delay_s=0.0)
    console.loading("prefill-0", 1_000_000, 4_000_000)
    console.loading("decode-0", 3_000_000, 4_000_000)
    console.log("router", "hello")
    console.close_bar()
    assert "50%" in stream.getvalue()
    assert "4.00M/8.00M" in stream.getvalue()
    assert "[router] hello\n" in stream.getvalue()


def test_recorded_graphs_are_counted_beside_the_weights() -> None:
    stream = io.StringIO()
    console = Console(stream)
    console.loading("decode-0", 4_000_000, 4_000_000)
    for done in (0, 1, 2):
        console.loading("decode-0", done, 2, GRAPHS)
    assert stream.getvalue().splitlines()[1:] == [
        "[decode-0] recording 2 CUDA graphs",
        "[decode-0] recorded 2 CUDA graphs",
    ]


def test_each_stage_has_a_bar_on_a_terminal() -> None:
    stream = FakeTerminal()
    console = Console(stream, bar_delay_s=0.0)
    console.loading("decode-0", 4_000_000, 4_000_000)
    console.loading("decode-0", 3, 12, GRAPHS)
    console.close_bar()
    assert "4.00M/4.00M" in stream.getvalue()
    assert "recording CUDA graphs:  25%" in stream.getvalue()
    assert "3/12" in stream.getvalue()


def test_a_terminal_that_is_gone_does_not_matter() -> None:
    console = Console(GoneTerminal())
    console.log("router", "hello")
    console.loading("prefill-0", 0, 4)
