"""Each output is delivered once and in order, whatever arrives in whatever order from whichever attempt."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.router.requests.output import CachedTokens, Delivery, Output
from baton.wire.messages.output import HandoffFigures, PromptRead, StepTimes, TokenEvent, TokenLogprobs
from baton.wire.tiers import TierTokens

HANDOFF = b"h" * 16
OLD = 999_999


def _event(index: int, *token_ids: int, attempt: int = 1, finish: str = "", cached: int = 0) -> TokenEvent:
    logprobs = tuple(TokenLogprobs(-float(token_id), (), ()) for token_id in token_ids)
    return TokenEvent(HANDOFF, attempt, index, token_ids, logprobs, finish, cached)


def _ids(deliveries: list[Delivery]) -> list[int]:
    return [token_id for delivery in deliveries for token_id in delivery.token_ids]


def test_tokens_are_delivered_with_their_logprobs() -> None:
    (delivery,) = Output().record(_event(0, 5, 6, finish="stop"))
    assert (delivery.token_ids, delivery.finish_reason) == ((5, 6), "stop")
    assert [entry.logprob for entry in delivery.logprobs] == [-5.0, -6.0]


def test_a_repeated_token_is_not_delivered_again() -> None:
    output = Output()
    assert _ids(output.record(_event(0, 5))) == [5]
    assert output.record(_event(0, 5)) == []
    (delivery,) = output.record(_event(0, 5, 6))
    assert delivery.token_ids == (6,)
    assert [entry.logprob for entry in delivery.logprobs] == [-6.0]


def test_a_token_that_comes_early_waits() -> None:
    output = Output()
    assert output.record(_event(2, 7, finish="length")) == []
    assert output.record(_event(1, 6)) == []
    deliveries = output.record(_event(0, 5))
    assert _ids(deliveries) == [5, 6, 7]
    assert [delivery.finish_reason for delivery in deliveries] == ["", "", "length"]


def test_events_with_tokens_in_common_are_joined() -> None:
    output = Output()
    assert output.record(_event(3, 8, 9)) == []
    assert output.record(_event(1, 6)) == []
    assert _ids(output.record(_event(0, 5, 6, 7, 8))) == [5, 6, 7, 8, 9]


def test_the_longer_of_two_early_events_is_kept() -> None:
    for lengths in ((1, 2), (2, 1)):
        output = Output()
        for length in lengths:
            assert output.record(_event(1, *(6, 7)[:length])) == []
        assert _ids(output.record(_event(0, 5))) == [5, 6, 7]


def test_an_old_attempt_changes_nothing() -> None:
    output = Output()
    output.record(_event(0, 5))
    output.record(_event(2, OLD))
    assert output.next_attempt() == 2
    assert output.record(_event(1, OLD)) == []
    assert _ids(output.record(_event(1, 6, attempt=2))) == [6]
    assert output.token_ids == [5, 6]


def test_what_comes_after_the_end_changes_nothing() -> None:
    output = Output()
    assert not output.has_finished
    output.record(_event(0, 5, finish="stop"))
    assert output.has_finished
    assert output.record(_event(1, 6)) == []
    assert output.token_ids == [5]


def test_early_tokens_after_the_end_are_dropped() -> None:
    output = Output()
    assert output.record(_event(2, 7)) == []
    assert output.record(_event(1, 6, finish="stop")) == []
    assert _ids(output.record(_event(0, 5))) == output.token_ids == [5, 6]
    assert (output.has_finished, output.has_gap) == (True, False)


def test_the_first_report_about_cached_tokens_counts() -> None:
    output = Output()
    assert output.num_cached_tokens is None
    output.record(_event(0, 5, cached=3))
    output.record(_event(1, 6, cached=9))
    assert output.num_cached_tokens == 3


def test_a_gap_that_cannot_close_is_an_error() -> None:
    output = Output()
    for index in range(1, 65):
        assert output.record(_event(index, index)) == []
    with pytest.raises(ValueError, match="output 0 never came, 65 did"):
        output.record(_event(65, 65))


@st.composite
def _histories(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, TokenEvent]]]:
    """An output of 1 to 12 tokens and, for each attempt, its events in any order with repetitions and overlaps.

    Every attempt sends wrong tokens when it is not the current one: whichever of them is delivered would be noticed.
    """
    output = list(range(100, 100 + draw(st.integers(1, 12))))
    num_attempts = draw(st.integers(1, 3))
    history: list[tuple[int, TokenEvent]] = []
    for attempt in range(1, num_attempts + 1):
        is_last = attempt == num_attempts
        pieces = [(index, index + 1) for index in range(len(output))]
        pieces += draw(st.lists(st.tuples(st.integers(0, len(output) - 1), st.integers(1, 12)), max_size=6))
        ordered = draw(st.permutations(pieces))
        if not is_last:
            ordered = ordered[: draw(st.integers(0, len(ordered)))]
        for first, last in ordered:
            tokens = output[first : max(first + 1, last)]
            finish = "stop" if first + len(tokens) == len(output) else ""
            if finish and not is_last:
                continue
            history.append((attempt, _event(first, *tokens, attempt=attempt, finish=finish)))
            stale = draw(st.integers(1, 3))
            if stale != attempt:
                history.append((attempt, _event(draw(st.integers(0, 12)), OLD, attempt=stale)))
    return output, history


@given(_histories())
def test_any_history_delivers_each_output_once_in_order(
    history: tuple[list[int], list[tuple[int, TokenEvent]]],
) -> None:
    expected, events = history
    output = Output()
    deliveries: list[Delivery] = []
    for attempt, event in events:
        while output.attempt < attempt:
            output.next_attempt()
        deliveries += output.record(event)
        assert _ids(deliveries) == expected[: len(_ids(deliveries))]
    assert _ids(deliveries) == output.token_ids == expected
    assert [delivery.finish_reason for delivery in deliveries][-1] == "stop"
    assert all(len(delivery.logprobs) == len(delivery.token_ids) for delivery in deliveries)


def test_what_the_handoff_took_is_kept_though_its_token_is_a_repetition() -> None:
    output = Output()
    figures = HandoffFigures(4, 4096, 900, 120)
    output.record(_event(0, 5))
    assert output.handoff is None
    assert output.record(replace(_event(0, 5), handoff=figures)) == []
    output.record(_event(1, 6))
    assert output.handoff == figures


def test_times_are_kept_though_their_token_is_a_repetition_or_early() -> None:
    output = Output()
    first, second = StepTimes(None, 1, 2), StepTimes(3, 4, 5)
    assert output.record(replace(_event(1, 6), times=second)) == []
    output.record(_event(0, 5))
    assert output.record(replace(_event(0, 5), times=first)) == []
    assert (output.times.first, output.times.second) == (first, second)


def _noted(event: TokenEvent, *, is_split: bool = True, pulled: range = range(0)) -> CachedTokens:
    cached = CachedTokens()
    cached.begin(1, is_split=is_split)
    cached.note(event, is_of_decode=not is_split, pulled=pulled)
    return cached


def test_cached_tokens_are_of_the_pool_that_had_them_the_peer_they_came_from_or_a_tier() -> None:
    loaded = replace(_event(0, 5, cached=160), tiers=(TierTokens("host", 64), TierTokens("disk", 16)))
    assert _noted(loaded).by_place(160) == {"prefill": 80, "host": 64, "disk": 16}
    assert _noted(loaded, is_split=False).by_place(160) == {"decode": 80, "host": 64, "disk": 16}
    assert _noted(loaded, pulled=range(16, 80)).by_place(160) == {"prefill": 16, "peer": 64, "host": 64, "disk": 16}
    assert _noted(_event(0, 5, cached=64), pulled=range(64)).by_place(64) == {"peer": 64}
    assert _noted(_event(0, 5)).by_place(0) == CachedTokens().by_place(0) == {}


@pytest.mark.parametrize(("cached", "places"), [(16, {"prefill": 16}), (48, {"prefill": 16, "peer": 32})])
def test_of_a_pull_counts_what_has_come(cached: int, places: dict[str, int]) -> None:
    """It was late, or failed: behind the first 16 tokens there is a part of the 64 that were asked for, or nothing."""
    assert _noted(_event(0, 5, cached=cached), pulled=range(16, 80)).by_place(cached) == places


@given(
    st.lists(st.integers(0, 99), max_size=3),
    st.builds(range, st.integers(0, 50), st.integers(0, 99)),
    st.integers(0, 99),
)
def test_places_have_together_what_was_cached_whatever_a_node_says(
    tiers: list[int], pulled: range, cached: int
) -> None:
    said = tuple(TierTokens(name, count) for name, count in zip(("host", "peer", "disk"), tiers, strict=False))
    places = _noted(replace(_event(0, 5, cached=cached), tiers=said), pulled=pulled).by_place(cached)
    assert sum(places.values()) == cached
    assert all(count > 0 for count in places.values())


def test_places_are_those_of_the_first_report_and_what_later_attempts_find_changes_nothing() -> None:
    cached = CachedTokens()
    cached.begin(1, is_split=True)
    cached.begin(2, is_split=False)  # of the first attempt nothing came
    assert cached.awaits_more
    cached.note(_event(0, 5, attempt=2, cached=48), is_of_decode=True)
    assert not cached.awaits_more
    cached.begin(3, is_split=True)
    assert not cached.awaits_more
    assert (cached.by_place(48), cached.by_role) == ({"decode": 48}, {})


def test_times_of_an_old_attempt_are_not_kept() -> None:
    output = Output()
    output.next_attempt()
    output.record(replace(_event(0, 5), times=StepTimes(None, 1, 2)))
    assert output.times.first is None


def test_log_probabilities_of_a_prompt_that_nobody_wants_change_nothing() -> None:
    output = Output()
    read = PromptRead(1, HANDOFF, attempt=1, first_row=0, num_rows=1, values=bytes(8))
    assert output.record_prompt(read) == []
    assert _ids(output.record(_event(0, 5))) == [5]
