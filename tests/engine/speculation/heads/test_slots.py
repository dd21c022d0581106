"""What is known of a head's slots: what waits, what was a wrong draft, and what is missing between."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.engine.speculation.heads.slots import MOST_ROWS, HeadSlots
from tests.request_keys import A, B, key_of


def rows(*values: float) -> Tensor:
    return torch.tensor(values)[:, None]


def waiting(slots: HeadSlots, num_slots: int) -> tuple[int, list[float]] | None:
    found = slots.rows(A, num_slots)
    return None if found is None else (found.first, found.streams[:, 0].tolist())


def test_a_stored_prompt_has_a_state_until_it_goes_on() -> None:
    slots = HeadSlots(4)
    assert slots.state(A, 9) is None
    slots.stored(A, 9, rows(0.5))
    state = slots.state(A, 9)
    assert state is not None
    assert state.tolist() == [[0.5]]
    assert slots.state(A, 10) is None
    assert slots.rows(A, 10) is None
    slots.wait(A, 9, rows(9.0))
    assert slots.state(A, 9) is None


def test_hidden_states_wait_for_the_tokens_behind_them() -> None:
    slots = HeadSlots(4)
    slots.stored(A, 9, rows(0.5))
    slots.wait(A, 9, rows(9.0))
    assert waiting(slots, 10) == (9, [9.0])
    slots.wait(A, 10, rows(10.0, 11.0, 12.0))
    # of two drafts one was right
    assert waiting(slots, 12) == (9, [9.0, 10.0, 11.0])
    slots.wait(A, 12, rows(12.5))
    assert waiting(slots, 13) == (9, [9.0, 10.0, 11.0, 12.5])
    slots.stored(A, 13, rows(0.25))
    assert waiting(slots, 13) is None
    slots.wait(A, 13, rows(13.0))
    assert waiting(slots, 14) == (13, [13.0])


def test_what_reaches_not_as_far_as_the_tokens_is_of_no_use() -> None:
    slots = HeadSlots(4)
    slots.wait(A, 9, rows(9.0))
    assert waiting(slots, 10) == (9, [9.0])
    assert waiting(slots, 11) is None
    assert waiting(slots, 9) is None


def test_a_gap_is_filled_with_the_first_state_behind_it() -> None:
    slots = HeadSlots(4)
    slots.stored(A, 9, rows(0.5))
    slots.wait(A, 12, rows(12.0))
    slots.wait(A, 13, rows(13.0))
    assert waiting(slots, 14) == (9, [12.0, 12.0, 12.0, 12.0, 13.0])
    slots.wait(A, 13 + 2 * MOST_ROWS, rows(1.0))
    found = waiting(slots, 14 + 2 * MOST_ROWS)
    assert found == (13 + MOST_ROWS, [1.0] * (MOST_ROWS + 1))


def test_a_request_that_comes_with_its_kv_has_all_slots_before() -> None:
    slots = HeadSlots(4)
    slots.wait(A, 40, rows(1.0))
    assert waiting(slots, 41) == (40, [1.0])


def test_a_request_that_goes_back_has_what_it_computes_anew() -> None:
    slots = HeadSlots(4)
    slots.stored(A, 20, rows(0.5))
    slots.wait(A, 12, rows(12.0))
    assert waiting(slots, 13) == (12, [12.0])


def test_memory_is_bounded_by_request_and_in_all() -> None:
    slots = HeadSlots(2)
    for place in range(3 * MOST_ROWS):
        slots.wait(A, place, rows(float(place)))
    found = slots.rows(A, 3 * MOST_ROWS)
    assert found is not None
    assert len(found.streams) == 2 * MOST_ROWS
    assert found.streams[-MOST_ROWS:, 0].tolist() == [*range(2 * MOST_ROWS, 3 * MOST_ROWS)]
    for number in range(3):
        slots.wait(key_of(number), 5, rows(1.0))
    assert slots.rows(A, 3 * MOST_ROWS) is None
    assert slots.rows(key_of(2), 6) is not None
    slots.wait(B, 5, rows(1.0))
    slots.forget(B)
    assert slots.rows(B, 6) is None
