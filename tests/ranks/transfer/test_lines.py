"""The lines of a driver to its ranks: who is told what, whose reports are heard, what becomes of one that is gone."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest

from baton.ranks.transfer.end import RankEnd
from baton.ranks.transfer.lines import RankLines
from baton.ranks.transfer.messages import Begin, Forget, Forgotten, Taken, TransferChannel
from baton.runtime.channel import ChannelBroken
from baton.wire.kv_shard import KvDivision
from tests.request_keys import A

DIVISION = KvDivision(2)
FIRST, SECOND = DIVISION.shards


class Own:
    """In the place of the driver's own end."""

    def __init__(self) -> None:
        self.reports: list[Any] = []
        self.told: list[Any] = []

    def enter(self) -> None:
        self.told.append("enter")

    def take(self, order: Any) -> None:
        self.told.append(order)

    def work(self) -> None:
        self.told.append("work")

    def wait_on(self) -> Sequence[Any]:
        return ("its own",)

    def close(self) -> None:
        self.told.append("close")


class Ends:
    """A driver's lines and the other rank's end of one."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.own = Own()
        self.rank = TransferChannel(theirs, "the driver")
        self.begin = Begin(host="127.0.0.1", cluster_key="", role="D")
        self.lines = RankLines(cast("RankEnd", self.own), FIRST, {SECOND: ours}, self.begin)
        self.heard: list[tuple[Any, Any]] = []

    def close(self) -> None:
        self.lines.close()
        self.rank.close()


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


def test_the_other_ranks_are_told_to_begin_and_all_of_them_each_order(ends: Ends) -> None:
    assert (ends.lines.division, ends.rank.receive(5.0), ends.own.told) == (DIVISION, ends.begin, [])
    ends.lines.tell(Forget(transport="nixl", key=A))
    assert (ends.rank.receive(5.0), ends.own.told) == (
        Forget(transport="nixl", key=A),
        [Forget(transport="nixl", key=A)],
    )


def test_reports_of_all_ranks_are_handled_with_whose_they_are(ends: Ends) -> None:
    ends.lines.hear(Taken, lambda shard, report: ends.heard.append((shard, report)))
    ends.own.reports = [Taken(number=1), Taken(number=2)]
    for number in (3, 4):
        ends.rank.send(Taken(number=number), 5.0)
    ends.lines.wait(30.0)
    ends.lines.round()
    assert ends.heard == [
        (FIRST, Taken(number=1)),
        (FIRST, Taken(number=2)),
        (SECOND, Taken(number=3)),
        (SECOND, Taken(number=4)),
    ]
    ends.lines.round()
    assert (len(ends.heard), ends.own.told) == (4, ["work", "work"])
    assert ends.lines.wait_on()[1:] == ["its own"]
    assert len(ends.lines.wait_on()) == 2


def test_a_wait_ends_when_a_rank_reports_or_in_time(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[tuple[int, int, int, float]] = []
    monkeypatch.setattr(
        "baton.ranks.transfer.lines.select.select",
        lambda r, w, x, timeout_s: waited.append((len(r), len(w), len(x), timeout_s)),
    )
    ends.lines.wait(0.25)
    assert waited == [(1, 0, 0, 0.25)]


def test_a_report_that_nobody_asked_for_ends_the_node(ends: Ends) -> None:
    ends.rank.send(Forgotten(transport="nixl", key=A), 5.0)
    ends.lines.wait(30.0)
    with pytest.raises(ChannelBroken, match="says Forgotten out of turn"):
        ends.lines.round()


def test_whoever_watches_the_processes_has_a_moment_to_tell_why_a_rank_is_gone(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("baton.ranks.transfer.lines.time.sleep", pauses.append)
    ends.rank.close()
    for _ in range(2):
        with pytest.raises(ChannelBroken):
            ends.lines.round()
    assert pauses == [1.0, 0.0]


def test_the_thread_that_uses_the_pool_is_the_one_that_enters_and_all_ends_are_closed(ends: Ends) -> None:
    ends.lines.enter()
    ends.rank.receive(5.0)
    ends.lines.close()
    assert ends.own.told == ["enter", "close"]
    with pytest.raises(ChannelBroken):
        ends.rank.receive(5.0)
