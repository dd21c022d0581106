"""When a group of nodes grows and shrinks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.launch.cluster.file import ClusterFile, parse_cluster_file
from baton.launch.cluster.policy import Change, Load, Policy, Reading, decode_pressure, prefill_pressure
from baton.wire.messages.membership import DECODE, PREFILL

FILE = """
[goals]
ttft_ms = 400
tpot_ms = 50
[scaling]
up_after_s = 10
down_after_s = 60
settle_s = 20
[prefill]
min = 0
max = 2
count = 1
[decode]
min = 1
max = 3
"""
CALM = Reading(10.0)
"""No requests."""
BUSY = Reading(10.0, queue_s=0.1, ttft_s=0.2, tpot_s=0.04, prefill=Load(2, num_busy=0.9), decode=Load(4))
"""Within its goals, and no node could be spared."""
QUEUES = replace(BUSY, queue_s=0.4)
SLOW = replace(BUSY, tpot_s=0.1)


def file() -> ClusterFile:
    return parse_cluster_file(FILE, "it")


def changes(readings: list[tuple[Reading, int]], prefill: int = 1, decode: int = 1) -> list[tuple[int, Change]]:
    """(second, change) of readings that last so many seconds each, with one decision a second; changes are made."""
    policy, counts, found, now = Policy(file()), {PREFILL: prefill, DECODE: decode}, [], 0
    for reading, seconds in readings:
        for _ in range(seconds):
            change = policy.decide(reading, counts, float(now))
            if change is not None:
                found.append((now, change))
                counts[change.role] = change.count
                policy.settle(float(now))
            now += 1
    return found


def test_a_prefill_group_grows_when_prompts_wait_for_half_of_the_goal_for_a_while() -> None:
    assert changes([(QUEUES, 10)]) == []
    ((second, change),) = changes([(QUEUES, 11)])
    assert (second, change.role, change.count) == (10, PREFILL, 2)
    assert change.reason == "prompts wait 400 ms, of 200 ms that they may"


def test_a_decode_group_grows_when_tokens_come_slower_than_the_goal() -> None:
    ((_, change),) = changes([(SLOW, 11)])
    assert (change.role, change.count, change.reason) == (DECODE, 2, "TPOT is 100 ms, the goal 50 ms")


def test_a_moment_within_the_goals_begins_the_wait_anew() -> None:
    assert changes([(SLOW, 9), (BUSY, 1), (SLOW, 9)]) == []


def test_after_a_change_nothing_is_judged_for_a_while() -> None:
    assert [(second, change.count) for second, change in changes([(SLOW, 60)])] == [(10, 2), (40, 3)]


def test_a_group_grows_to_its_maximum_and_shrinks_to_its_minimum() -> None:
    counts = [(change.role, change.count) for _, change in changes([(SLOW, 300), (CALM, 600)], prefill=2)]
    assert counts[:2] == [(DECODE, 2), (DECODE, 3)]
    assert sorted(counts[2:]) == [(DECODE, 1), (DECODE, 2), (PREFILL, 0), (PREFILL, 1)]


def test_one_change_at_a_time_and_the_worse_first() -> None:
    both = replace(QUEUES, tpot_s=0.4)
    assert [change.role for _, change in changes([(both, 75)])] == [DECODE, DECODE, PREFILL]


def test_what_is_missed_comes_before_what_could_be_saved() -> None:
    idle = replace(BUSY, queue_s=0.0, prefill=Load())
    slow = replace(idle, tpot_s=0.1)
    # at second 60 a prefill node could be spared for a minute, and a decode node was missed for ten seconds
    assert [change.role for _, change in changes([(idle, 50), (slow, 11)], prefill=2)] == [DECODE]


@pytest.mark.parametrize(
    "reading",
    [
        pytest.param(replace(CALM, tpot_s=0.03, decode=Load(2)), id="on one node less TPOT would come near its goal"),
        pytest.param(replace(CALM, decode=Load(seqs_share=0.4)), id="one node less would have too many requests"),
        pytest.param(replace(CALM, decode=Load(kv_share=0.5)), id="one node less would have too much KV"),
    ],
)
def test_a_decode_node_that_is_needed_stays(reading: Reading) -> None:
    assert [change for _, change in changes([(reading, 300)], decode=2, prefill=0) if change.role == DECODE] == []


def test_what_a_request_alone_on_its_node_misses_is_no_reason_for_more_nodes() -> None:
    alone = replace(CALM, tpot_s=0.2, decode=Load(1))
    assert changes([(alone, 100)], prefill=0) == []
    assert [change.count for _, change in changes([(alone, 100)], prefill=0, decode=2)] == [1], "one is idle"


def test_a_prefill_node_that_is_busy_stays() -> None:
    busy = replace(CALM, queue_s=0.01, prefill=Load(1, num_busy=1.2))
    assert changes([(busy, 300)], prefill=2) == []
    idle = replace(busy, prefill=Load(1, num_busy=0.4))
    ((_, change),) = changes([(idle, 61)], prefill=2)
    assert (change.count, change.reason) == (1, "1 would do: prompts wait 10 ms, of 200 ms that they may")


def test_a_prompt_that_is_alone_on_its_node_is_no_reason_for_more_nodes_however_late_it_is() -> None:
    alone = replace(CALM, queue_s=0.5, ttft_s=2.0, prefill=Load(0.1, num_busy=0.1))
    assert changes([(alone, 100)]) == []
    ((_, change),) = changes([(alone, 100)], prefill=2)
    assert (change.count, change.reason) == (1, "1 would do: prompts are alone on their nodes")
    assert changes([(replace(alone, queue_s=None), 100)]) == [], "nor its TTFT"
    late = replace(alone, prefill=Load())
    assert [change.count for _, change in changes([(late, 11)], prefill=0)] == [1], "decode nodes compute it, not alone"


def test_without_a_common_clock_the_ttft_counts() -> None:
    pressure = prefill_pressure(replace(CALM, ttft_s=0.6, prefill=Load(3, num_busy=1.0)), 0.4, 1)
    assert pressure.value == pytest.approx(1.5)
    assert pressure.reason == "TTFT is 600 ms, the goal 400 ms"


def test_prompts_that_wait_while_none_is_answered_are_a_reason() -> None:
    stuck = replace(CALM, prefill=Load(3, num_waiting=2))
    assert prefill_pressure(stuck, 0.4, 1).value > 1
    assert prefill_pressure(CALM, 0.4, 1).value == 0


def test_requests_that_wait_for_room_or_kv_that_is_held_are_reasons_too() -> None:
    assert decode_pressure(replace(CALM, num_held_back=3.0), 0.05, 1).reason == "3 requests wait for room"
    full = decode_pressure(replace(CALM, decode=Load(kv_share=0.99)), 0.05, 1)
    assert full.value > 1
    assert full.reason == "99% of the KV is held, of 90% that may be"
