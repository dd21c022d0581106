"""A stream is cut at the stop string that is complete first, however the text was split."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.text.stop_strings import StopResult, StopStringMatcher
from baton.wire.errors import InvalidRequest

texts = st.text("ab", max_size=30)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)
cuts = st.lists(st.integers(0, 30), max_size=10)


def cut_whole(text: str, stops: Sequence[str], include_stop: bool) -> tuple[str, str | None]:
    """The obvious search: the shortest beginning of the text that ends with a stop string."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include_stop else end - len(stop)], stop
    return text, None


@given(text=texts, stops=stop_lists, cuts=cuts, include_stop=st.booleans())
def test_equals_a_cut_of_the_whole_text(text: str, stops: list[str], cuts: list[int], include_stop: bool) -> None:
    matcher = StopStringMatcher(stops, include_stop)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    results = [matcher.push(text[start:end]) for start, end in pairwise(edges)]
    streamed = "".join(result.text for result in results) + matcher.finish()
    assert (streamed, results[-1].stop) == cut_whole(text, stops, include_stop)


@given(text=texts, stops=stop_lists)
def test_holds_back_no_more_than_could_become_a_stop(text: str, stops: list[str]) -> None:
    matcher = StopStringMatcher(stops)
    result = matcher.push(text)
    if result.stop is None:
        held = text[len(result.text) :]
        ends = [text[-size:] for size in range(1, 6) if size <= len(text)]
        beginnings = [end for end in ends if any(stop.startswith(end) for stop in stops)]
        assert held == max(beginnings, key=len, default="")


def test_holds_a_beginning_and_releases_it_when_it_goes_on_differently() -> None:
    matcher = StopStringMatcher(["\n\nUser:"])
    assert matcher.push("Hi.\n") == StopResult("Hi.")
    assert matcher.push("\nUse") == StopResult("")
    assert matcher.push("ful") == StopResult("\n\nUseful")


def test_cuts_before_or_after_the_stop_string() -> None:
    assert StopStringMatcher(["END"]).push("text END more") == StopResult("text ", "END")
    assert StopStringMatcher(["END"], include_stop=True).push("text END more") == StopResult("text END", "END")


def test_a_stop_string_within_the_beginning_of_another_ends_the_stream() -> None:
    assert StopStringMatcher(["abcd", "bc"]).push("xabce") == StopResult("xa", "bc")


def test_of_two_complete_at_the_same_character_the_longer_cuts() -> None:
    assert StopStringMatcher(["c", "abc"]).push("xabc") == StopResult("x", "abc")


def test_finish_releases_the_held_text() -> None:
    matcher = StopStringMatcher(["END"])
    assert matcher.push("the EN") == StopResult("the ")
    assert matcher.finish() == "EN"


def test_after_a_match_everything_is_dropped() -> None:
    matcher = StopStringMatcher(["x"])
    matcher.push("ax")
    assert matcher.push("b") == StopResult("", "x")
    assert matcher.finish() == ""


def test_without_stops_everything_passes() -> None:
    assert StopStringMatcher([]).push("any text") == StopResult("any text")


def test_an_empty_stop_string_is_the_clients_error() -> None:
    with pytest.raises(InvalidRequest, match="must not be empty"):
        StopStringMatcher(["a", ""])
