from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from baton.engine.scheduler.step import RequestOutput, SampledToken
from baton.node.first_steps import FirstSteps
from baton.wire.messages.output import StepTimes
from baton.wire.request_key import RequestKey

KEY = RequestKey(b"h" * 16, 1)
OTHER = RequestKey(b"o" * 16, 1)


@pytest.fixture
def clock() -> Iterator[int]:
    return count(1)


@pytest.fixture
def steps(clock: Iterator[int]) -> FirstSteps:
    """By a clock that counts how often it was read."""
    return FirstSteps(lambda: next(clock))


def output(*, token: bool = True, key: RequestKey = KEY, has_left: bool = False) -> RequestOutput:
    sampled = (SampledToken(5, None),) if token else ()
    return RequestOutput(key, 1, 1, 0, 0, sampled, "", has_left, has_failed=False)


def run(steps: FirstSteps, *outputs: RequestOutput) -> list[StepTimes | None]:
    """One step: it begins at an odd time and ends at the next even one."""
    steps.step_begins()
    steps.step_ends()
    return [steps.times_of(item) for item in outputs]


def test_a_prompt_of_several_chunks_begins_with_the_first_of_them(steps: FirstSteps) -> None:
    steps.watch(KEY, num_tokens=2)
    assert run(steps) == []
    assert run(steps, output(token=False)) == [None]
    assert run(steps, output()) == [StepTimes(None, 3, 6)]


def test_each_watched_token_has_the_times_of_its_own_steps(steps: FirstSteps) -> None:
    steps.watch(KEY, num_tokens=2)
    assert run(steps, output()) == [StepTimes(None, 1, 2)]
    run(steps, output(key=OTHER))
    assert run(steps, output()) == [StepTimes(None, 5, 6)]


def test_a_step_launched_on_top_of_another_begins_when_that_one_ends(steps: FirstSteps) -> None:
    steps.watch(KEY, num_tokens=2)
    steps.step_begins()  # 1
    steps.step_begins()  # 2
    steps.step_ends()  # 3
    assert steps.times_of(output()) == StepTimes(None, 1, 3)
    steps.step_begins()  # 4
    steps.step_ends()  # 5
    assert steps.times_of(output()) == StepTimes(None, 3, 5)


def test_a_prompt_that_joins_while_a_step_runs_has_the_times_of_its_own(steps: FirstSteps) -> None:
    steps.step_begins()  # 1
    steps.watch(KEY, num_tokens=1)
    steps.step_begins()  # 2
    steps.step_ends()  # 3
    assert steps.times_of(output(key=OTHER)) is None
    steps.step_ends()  # 4
    assert steps.times_of(output()) == StepTimes(None, 3, 4)


def test_steps_that_are_lost_stamp_nothing(steps: FirstSteps) -> None:
    steps.watch(KEY, num_tokens=1)
    steps.step_begins()  # 1
    steps.step_begins()  # 2
    steps.steps_lost()
    steps.step_ends()  # not one of them
    assert run(steps, output()) == [StepTimes(None, 3, 4)]


def test_what_comes_after_the_watched_tokens_is_not_timed(steps: FirstSteps) -> None:
    steps.watch(KEY, num_tokens=1)
    run(steps, output())
    assert len(steps) == 0
    assert run(steps, output()) == [None]


def test_a_handoff_says_since_when_its_kv_was_there_and_only_once(steps: FirstSteps) -> None:
    steps.watch(KEY, num_tokens=2, ready_us=0)
    assert run(steps, output()) == [StepTimes(0, 1, 2)]
    assert run(steps, output()) == [StepTimes(None, 3, 4)]


def test_requests_do_not_mix(steps: FirstSteps) -> None:
    steps.watch(KEY, num_tokens=1)
    run(steps, output(token=False))
    steps.watch(OTHER, num_tokens=1)
    assert run(steps, output(), output(key=OTHER)) == [StepTimes(None, 1, 4), StepTimes(None, 3, 4)]


@pytest.mark.parametrize("has_token", [True, False])
def test_a_request_that_leaves_early_leaves_nothing(steps: FirstSteps, has_token: bool) -> None:
    steps.watch(KEY, num_tokens=2)
    run(steps, output(token=has_token, has_left=True))
    assert len(steps) == 0


def test_a_forgotten_request_leaves_nothing(steps: FirstSteps) -> None:
    steps.watch(KEY, num_tokens=2)
    run(steps, output(token=False))
    steps.forget(KEY)
    steps.forget(KEY)
    assert len(steps) == 0
    assert run(steps, output()) == [None]


def test_the_clock_is_read_twice_a_step_however_many_tokens_there_are(steps: FirstSteps, clock: Iterator[int]) -> None:
    steps.watch(KEY, num_tokens=1)
    run(steps, output(), *(output(key=RequestKey.numbered(number)) for number in range(50)))
    assert next(clock) == 3
