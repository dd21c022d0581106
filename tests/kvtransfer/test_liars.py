"""A few hundred lies to the ends of the transports; `python -m tests.kvtransfer.liars` tells more."""

from __future__ import annotations

import pytest

from tests.kvtransfer.liars.__main__ import attack


@pytest.mark.parametrize(("name", "num_lies"), [("shm", 400), ("shm_slots", 400)])
def test_lies_cost_no_good_handoff_and_leave_nothing(name: str, num_lies: int) -> None:
    liars = attack(name, 3, lambda liars: liars.num_acts >= num_lies)
    assert liars.num_good == num_lies // 25
