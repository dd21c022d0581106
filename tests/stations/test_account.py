"""A gap belongs to the station at which its token was held up, and what its threads waited for a processor is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stations.account import Account, account_of
from tests.stations.ring import NUM_STAMPS, STAMP, Station, handoff_key, request_key
from tests.stations.stamps import Stamps, stalls

REQUEST, HANDOFF = request_key("cmpl-1"), handoff_key(bytes(range(16)))
TURNS_S = [10.0 + number / 50 for number in range(100)]


def write(
    folder: Path, program: str, *stamps: tuple[float, Station, int], waited: tuple[float, float] = (0.0, 0.0)
) -> None:
    """Stamps (moment, station, index) of a program that from the moment `waited[0]` on has waited `waited[1]` s."""
    turns = [(moment_s, Station.TURN, 0) for moment_s in TURNS_S]
    with (folder / f"{program}.stamps").open("wb") as file:
        for moment_s, station, index in [*stamps, *turns]:
            own_s = 1.0 + (waited[1] if moment_s >= waited[0] else 0.0)
            file.write(STAMP.pack(moment_s, moment_s / 10, own_s, 0.0, REQUEST, HANDOFF, index, 0, station))
        file.write(bytes(STAMP.size))


def way(emitted_s: float, *later_s: float) -> tuple[float, float, float, float, float]:
    """Each later station a millisecond after the one before, or by `later_s` later."""
    moments_s = [emitted_s]
    for late_s in later_s or (0.0,) * 4:
        moments_s.append(moments_s[-1] + 0.001 + late_s)
    emitted_s, received_s, taken_s, written_s, came_s = moments_s
    return emitted_s, received_s, taken_s, written_s, came_s


def account(
    folder: Path, emitted_s: float, *later_s: float, waits: str = "", waited: tuple[float, float] = (0.0, 0.0)
) -> Account:
    """Of a gap before token 4, which came that late."""
    ways = {3: way(10.2), 4: way(emitted_s, *later_s)}
    stations = (Station.RECEIVED, Station.TAKEN, Station.WRITTEN)
    router = [
        (s, each, token) for token, moments in ways.items() for s, each in zip(moments[1:], stations, strict=False)
    ]
    for program, stamps in (
        ("decode-0", [(moments[0], Station.EMITTED, token) for token, moments in ways.items()]),
        ("router", router),
        ("client", []),
    ):
        write(folder, program, *stamps, waited=waited if program == waits else (0.0, 0.0))
    found = account_of(Stamps(folder, 0.0), REQUEST, 0, (3, ways[3][4]), (4, ways[4][4]))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("late", "name"),
    [
        ((10.9,), "in making"),
        ((10.22, 0.68, 0.0, 0.0, 0.0), "from the node to the router"),
        ((10.22, 0.0, 0.68, 0.0, 0.0), "in the router's inbox"),
        ((10.22, 0.0, 0.0, 0.68, 0.0), "in writing"),
        ((10.22, 0.0, 0.0, 0.0, 0.68), "from the router to the client"),
    ],
    ids=["node", "link", "inbox", "writing", "client"],
)
def test_a_gap_belongs_to_the_station_that_held_the_token_up(
    tmp_path: Path, late: tuple[float, ...], name: str
) -> None:
    found = account(tmp_path, late[0], *late[1:5])
    assert found.longest.name == name
    assert sum(hop.grown_s for hop in found.hops) == pytest.approx(0.7)
    assert found.longest.grown_s > 0.67
    assert found.waited_s == 0.0
    assert name in str(found)


def test_only_the_waits_of_who_had_to_act_count_and_no_more_than_the_hop_took(tmp_path: Path) -> None:
    late = (10.22, 0.0, 0.5, 0.0, 0.0)
    assert account(tmp_path, *late, waits="router", waited=(10.6, 0.3)).waited_s == pytest.approx(0.3)
    assert account(tmp_path, *late, waits="router", waited=(10.6, 9.0)).waited_s == pytest.approx(0.5)
    assert account(tmp_path, *late, waits="client", waited=(10.6, 0.3)).waited_s == 0.0
    assert account(tmp_path, *late, waits="router", waited=(11.5, 0.3)).waited_s == 0.0


def test_a_token_that_was_not_stamped_everywhere_has_no_account(tmp_path: Path) -> None:
    write(tmp_path, "router", (10.2, Station.RECEIVED, 3), (10.3, Station.TAKEN, 3))
    assert account_of(Stamps(tmp_path, 0.0), REQUEST, 0, (-1, 10.0), (3, 10.4)) is None
    assert account_of(Stamps(tmp_path / "none", 0.0), REQUEST, 0, (-1, 10.0), (3, 10.4)) is None


def test_stalls_are_those_of_the_time(tmp_path: Path) -> None:
    assert stalls(tmp_path, 0.0, 9.0) == []
    (tmp_path / "router.stalls").write_text("1.0 0.2 R 0 a\n2.0 0.3 D x b\n3.0 0.2 R 0 c\n")
    assert stalls(tmp_path, 1.0, 2.0) == ["2.0 0.3 D x b"]
    assert NUM_STAMPS > 50 * 60, "a minute of turns fits into a ring"
