from __future__ import annotations

import random

import pytest

from baton.kvtransfer.leases import LeaseTable


def table_of(**deadlines: float) -> LeaseTable[str]:
    table: LeaseTable[str] = LeaseTable()
    for owner, deadline_s in deadlines.items():
        table.begin(owner, deadline_s)
    return table


def overdue(table: LeaseTable[str], now_s: float) -> set[str]:
    return set(table.overdue(now_s))


def test_a_lease_is_overdue_from_its_deadline_on() -> None:
    table = table_of(a=10.0, b=20.0)
    assert overdue(table, 9.999) == set()
    assert overdue(table, 10.0) == {"a"}
    assert overdue(table, 20.0) == {"a", "b"}


def test_an_overdue_lease_is_found_again_until_it_is_ended() -> None:
    table = table_of(a=10.0)
    assert overdue(table, 11.0) == overdue(table, 12.0) == {"a"}
    assert table.end("a")
    assert overdue(table, 13.0) == set()
    assert not table.end("a")


def test_a_thousand_leases_behind_a_renewed_one_expire_in_one_call() -> None:
    table: LeaseTable[int] = LeaseTable()
    for owner in range(1001):
        table.begin(owner, 10.0 + owner / 1000)
    table.renew(0, 100.0)
    assert set(table.overdue(12.0)) == set(range(1, 1001))


def test_a_renewal_never_brings_a_deadline_forward() -> None:
    table = table_of(a=10.0)
    assert table.renew("a", 5.0)
    assert overdue(table, 9.0) == set()
    assert not table.renew("b", 5.0)


def test_an_owner_holds_one_lease_at_most() -> None:
    table = table_of(a=10.0)
    with pytest.raises(ValueError, match="already"):
        table.begin("a", 20.0)
    assert "a" in table
    assert len(table) == 1


def test_an_ended_lease_does_not_shorten_the_owners_next_one() -> None:
    table = table_of(a=10.0)
    table.end("a")
    table.begin("a", 50.0)
    assert overdue(table, 49.0) == set()
    assert overdue(table, 50.0) == {"a"}


@pytest.mark.parametrize("seed", range(5))
def test_any_order_of_events_finds_exactly_the_overdue_leases(seed: int) -> None:
    draw = random.Random(seed)
    table: LeaseTable[int] = LeaseTable()
    deadlines: dict[int, float] = {}
    for now_s in range(400):
        owner, deadline_s = draw.randrange(30), float(now_s + draw.randrange(40))
        action = draw.choice(("renew", "renew", "end"))
        if owner not in deadlines:
            table.begin(owner, deadline_s)
            deadlines[owner] = deadline_s
        elif action == "renew":
            table.renew(owner, deadline_s)
            deadlines[owner] = max(deadlines[owner], deadline_s)
        else:
            table.end(owner)
            del deadlines[owner]
        expected = {owner for owner, deadline_s in deadlines.items() if deadline_s <= now_s}
        assert sorted(table.overdue(now_s)) == sorted(expected)
        assert {owner for owner in range(30) if owner in table} == deadlines.keys()


def test_owners_that_have_no_order_may_have_the_same_deadline() -> None:
    table: LeaseTable[object] = LeaseTable()
    owners = [object() for _ in range(5)]
    for owner in owners:
        table.begin(owner, 10.0)
    for _ in range(3):
        assert table.overdue(10.0) == owners
