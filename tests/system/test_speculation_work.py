"""Tasks are the same each time and others by number, and those that are copied show what is copied."""

from __future__ import annotations

import pytest

from tests.system.speculation_work import COPYING, KINDS, PROSE, mixture


@pytest.mark.parametrize("kind", KINDS)
def test_a_task_is_known_by_its_number(kind: str) -> None:
    make = KINDS[kind]
    tasks = [make(number) for number in range(30)]
    assert tasks == [make(number) for number in range(30)]
    assert len({task.question for task in tasks}) == len(tasks)
    assert all(task.kind == kind and task.copied in task.question for task in tasks)


def test_half_of_a_mixture_copies_and_every_kind_is_in_it() -> None:
    kinds = [task.kind for task in mixture(0, 8)]
    assert [kind for kind in kinds if kind in COPYING] == list(COPYING)
    assert [kind for kind in kinds if kind in PROSE] == 4 * list(PROSE)
