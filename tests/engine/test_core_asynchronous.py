"""What EngineCore promises while steps are in flight: who owns which block, whose result is whose, and failures."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest

from baton.device.base import DeviceFailed
from baton.engine.attention.base import LayerStored
from baton.engine.cache.block_pool import BlockPool
from baton.engine.core import EngineCore
from baton.engine.handoffs import FirstToken
from baton.engine.scheduler.limits import SchedulerLimits
from baton.engine.scheduler.reading import RowsRead
from baton.engine.scheduler.request import PENDING_TOKEN
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.step import SampledToken, SampledTokens, Step
from baton.engine.steps_in_flight import StepFailed
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams
from tests.engine.test_core import note, num_held, run
from tests.request_keys import A, B, key_of

EOS = 0
ENDLESS = DecodingParams(temperature=0, max_tokens=12, ignore_eos=True)
UNTIL_EOS = DecodingParams(temperature=0, max_tokens=12)


@dataclass
class LateStep:
    """A step that writes into its blocks when its result is asked for, however late that is."""

    runner: LateRunner
    number: int
    keys: list[RequestKey]
    blocks: dict[int, int]
    tokens: Mapping[RequestKey, SampledTokens]

    def result(self) -> Mapping[RequestKey, SampledTokens]:
        self.runner.write(self)
        error = self.runner.result_errors.pop(self.number, None)
        if error is not None:
            raise error
        return self.tokens

    def rows_read(self) -> Mapping[RequestKey, RowsRead]:
        return {}


@dataclass
class LateRunner:
    """Samples `sample(key, position)`. Fails where the two tables of errors, by number of the launch, say so.

    `is_disturbed`: a step wrote into a block that had been released, or allocated again, since its launch.
    """

    pool: BlockPool
    is_asynchronous: bool = True
    sample: Callable[[RequestKey, int], int] = lambda key, position: position
    launch_errors: dict[int, Exception] = field(default_factory=dict)
    result_errors: dict[int, Exception] = field(default_factory=dict)
    is_disturbed: bool = False
    num_launched: int = 0
    in_flight: deque[LateStep] = field(default_factory=deque)
    steps: list[list[RequestKey]] = field(default_factory=list)

    def launch(self, step: Step, layer_stored: LayerStored | None = None) -> LateStep:
        self.num_launched += 1
        keys = [share.key for share in step.requests]
        self.steps.append(keys)
        if self.num_launched in self.launch_errors:
            raise self.launch_errors.pop(self.num_launched)
        assert len(self.in_flight) < 2
        blocks = {block: self.pool.generation(block) for share in step.requests for block in share.block_table}
        tokens = {
            share.key: (SampledToken(self.sample(share.key, len(share.token_ids)), None),)
            for share in step.requests
            if share.needs_sample
        }
        late = LateStep(self, self.num_launched, keys, blocks, tokens)
        self.in_flight.append(late)
        return late

    def write(self, step: LateStep) -> None:
        if step in self.in_flight:
            assert self.in_flight.popleft() is step
        for block, generation in step.blocks.items():
            self.is_disturbed |= self.pool.generation(block) != generation or self._is_free(block)

    def _is_free(self, block: int) -> bool:
        return self.pool.num_available_beside([block]) < self.pool.num_available


def new_core(num_blocks: int = 16, *, is_asynchronous: bool = True, budget: int = 16) -> tuple[EngineCore, LateRunner]:
    pool = BlockPool(num_blocks)
    runner = LateRunner(pool, is_asynchronous)
    limits = SchedulerLimits(4, 4, budget, num_blocks * 4)
    return EngineCore(pool, Scheduler(pool, limits, frozenset({EOS})), runner, "f"), runner


def prompt(num_tokens: int, first: int = 100) -> list[int]:
    return list(range(first, first + num_tokens))


def positions(num_prompt_tokens: int, num_tokens: int = 12) -> list[int]:
    """What `LateRunner` samples."""
    return list(range(num_prompt_tokens, num_prompt_tokens + num_tokens))


def test_two_steps_are_in_flight_at_most_and_one_between_calls() -> None:
    core, runner = new_core()
    core.add(A, Prompt.of(prompt(5)), ENDLESS)
    for number in range(1, 12):
        core.step()
        assert core.num_steps_in_flight
        assert len(runner.in_flight) == 1
        assert runner.num_launched == number + 1
    core.step()
    assert not core.num_steps_in_flight
    assert not core.has_work
    assert runner.num_launched == 12


def test_a_runner_that_is_not_asynchronous_has_nothing_in_flight_between_calls() -> None:
    core, runner = new_core(is_asynchronous=False)
    core.add(A, Prompt.of(prompt(5)), ENDLESS)
    for number in range(1, 13):
        core.step()
        assert not core.num_steps_in_flight
        assert runner.num_launched == number
    assert not core.has_work


# --- blocks


def test_blocks_of_a_request_that_ends_stay_until_the_next_step_is_collected() -> None:
    core, runner = new_core(num_blocks=4)
    runner.sample = lambda key, position: EOS if position == 6 else 9
    core.add(A, Prompt.of(prompt(5)), UNTIL_EOS)
    core.step()
    (output,) = core.step()
    assert output.finish_reason == "stop"
    assert core.request_keys() == []
    assert core.has_work
    core.check()
    assert num_held(core) == 2
    assert core.handoffs.reserve(key_of("remote"), Prompt.of(prompt(12, 300))) is None
    assert core.step() == []
    core.check()
    assert num_held(core) == 0
    assert not core.has_work
    assert not runner.is_disturbed


def test_blocks_of_an_aborted_request_stay_until_its_step_is_collected() -> None:
    core, runner = new_core(num_blocks=4)
    core.add(A, Prompt.of(prompt(5)), ENDLESS)
    core.step()
    assert core.abort(A)
    assert not core.abort(A)
    core.check()
    assert num_held(core) == 2
    reservation = core.handoffs.reserve(key_of("remote"), Prompt.of(prompt(8, 300)))
    assert reservation is not None
    assert core.step() == []
    core.check()
    assert not runner.is_disturbed
    assert num_held(core) == 2
    assert core.handoffs.release(key_of("remote"))


def test_blocks_of_a_request_that_is_in_no_step_are_released_at_once() -> None:
    core, runner = new_core(num_blocks=8)
    core.add(A, Prompt.of(prompt(5)), ENDLESS)
    core.step()
    reservation = core.handoffs.reserve(B, Prompt.of(prompt(8, 300)))
    assert reservation is not None
    core.handoffs.add_reserved(reservation, Prompt.of(prompt(8, 300)), [FirstToken(B, ENDLESS, 1)])
    assert core.abort(B)
    assert num_held(core) == 2
    core.check()
    assert runner.num_launched == 2


def test_blocks_of_requests_of_a_failed_step_can_be_released_at_once() -> None:
    core, runner = new_core()
    runner.result_errors[2] = OSError("lost")
    core.add(A, Prompt.of(prompt(5)), ENDLESS)
    core.step()
    with pytest.raises(StepFailed) as caught:
        core.step()
    assert runner.num_launched == 3
    assert not runner.in_flight, "the next step was waited for"
    for key in caught.value.keys:
        core.abort(key)
    core.check()
    assert num_held(core) == 0
    assert not runner.is_disturbed


def test_an_aborted_request_of_a_step_that_fails_releases_its_blocks_once() -> None:
    core, runner = new_core()
    runner.result_errors[2] = OSError("lost")
    for number, key in enumerate((A, B)):
        core.add(key, Prompt.of(prompt(5, 100 * number)), ENDLESS)
    core.step()
    core.abort(A)
    core.check()
    with pytest.raises(StepFailed) as caught:
        core.step()
    assert caught.value.keys == [B]
    core.check()
    assert num_held(core) == 2
    assert run(core) == {B: positions(6, 11)}
    assert not runner.is_disturbed


def test_the_next_request_gets_the_room_when_the_step_is_collected() -> None:
    core, runner = new_core(num_blocks=3)
    core.add(A, Prompt.of(prompt(5)), ENDLESS)
    core.step()
    core.add(B, Prompt.of(prompt(9, 300)), DecodingParams(max_tokens=3, ignore_eos=True))
    core.step()
    core.abort(A)
    assert core.step() == []
    assert run(core) == {B: positions(9, 3)}
    assert not runner.is_disturbed


def test_a_prompt_whose_first_token_was_wanted_is_not_in_the_next_step_and_its_blocks_are_held() -> None:
    core, runner = new_core()
    core.add(A, Prompt.of(prompt(5)), ENDLESS, first_token_only=True)
    core.add(B, Prompt.of(prompt(5, 300)), ENDLESS)
    (first, _) = core.step()
    assert first.has_left
    assert runner.steps == [[A, B], [B]]
    table = list(core.handoffs.block_table(A))
    assert len(table) == 2
    core.check()
    assert core.handoffs.release(A)
    core.check()
    assert num_held(core) == 2


def test_a_prompt_that_is_aborted_in_the_middle_leaves_nothing_to_release() -> None:
    core, runner = new_core(budget=4)
    core.add(A, Prompt.of(prompt(14)), ENDLESS, first_token_only=True)
    core.step()
    assert core.abort(A)
    assert not core.handoffs.release(A)
    assert core.step() == []
    core.check()
    assert num_held(core) == 0
    assert not runner.is_disturbed


# --- whose result


def test_a_key_can_be_used_again_while_its_old_step_is_in_flight() -> None:
    core, runner = new_core()
    core.add(A, Prompt.of(prompt(5)), ENDLESS)
    core.step()
    core.abort(A)
    core.add(A, Prompt.of(prompt(7, 300)), DecodingParams(max_tokens=3, ignore_eos=True))
    assert core.step() == [], "the old step"
    assert run(core) == {A: positions(7, 3)}
    assert not runner.is_disturbed


def test_a_key_that_is_reused_next_to_others_gets_its_own_tokens() -> None:
    core, _ = new_core()
    core.add(A, Prompt.of(prompt(5)), ENDLESS)
    core.add(B, Prompt.of(prompt(9, 200)), DecodingParams(max_tokens=5, ignore_eos=True))
    core.step()
    core.abort(A)
    core.add(A, Prompt.of(prompt(7, 300)), DecodingParams(max_tokens=3, ignore_eos=True))
    assert [output.key for output in core.step()] == [B], "the old step; the new one is in flight"
    assert run(core) == {A: positions(7, 3), B: positions(9, 5)[2:]}


def test_requests_with_kv_join_while_a_step_is_in_flight() -> None:
    core, runner = new_core()
    core.add(A, Prompt.of(prompt(5)), ENDLESS)
    core.step()
    reservation = core.handoffs.reserve(B, Prompt.of(prompt(8, 300)))
    assert reservation is not None
    core.step()
    core.handoffs.add_reserved(reservation, Prompt.of(prompt(8, 300)), [FirstToken(B, ENDLESS, 1)])
    core.check()
    assert run(core) == {A: positions(7, 10), B: positions(9, 11)}
    assert not runner.is_disturbed


def test_penalties_are_sampled_with_nothing_pending() -> None:
    core, runner = new_core()
    seen: list[list[int]] = []
    core.add(A, Prompt.of(prompt(5)), DecodingParams(max_tokens=4, ignore_eos=True, frequency_penalty=0.5))
    while core.has_work:
        core.step(lambda step: seen.append(list(step.requests[0].token_ids)))
    assert not any(PENDING_TOKEN in token_ids for token_ids in seen)
    assert [len(token_ids) for token_ids in seen] == [5, 6, 7, 8]
    assert runner.num_launched == 4


# --- failures


@pytest.mark.parametrize("is_at_launch", [False, True])
@pytest.mark.parametrize("number", [1, 2, 3, 6])
def test_a_step_that_fails_can_be_tried_again_wherever_it_lay(number: int, is_at_launch: bool) -> None:
    core, runner = new_core()
    errors = runner.launch_errors if is_at_launch else runner.result_errors
    errors[number] = OSError("lost")
    for position, key in enumerate((A, B)):
        core.add(key, Prompt.of(prompt(5, 100 * position)), ENDLESS)
    tokens: dict[RequestKey, list[int]] = {A: [], B: []}
    failures: list[tuple[list[RequestKey], bool]] = []
    while core.has_work:
        try:
            note(core.step(), tokens)
        except StepFailed as error:
            failures.append((error.keys, bool(core.num_steps_in_flight or runner.in_flight)))
        core.check()
    assert failures == [([A, B], False)]
    assert tokens == {A: positions(5), B: positions(5)}
    assert num_held(core) == 0
    assert not runner.is_disturbed


def test_a_next_step_that_cannot_be_launched_costs_the_one_before_nothing() -> None:
    core, runner = new_core(budget=6)
    runner.launch_errors[2] = OSError("no memory")
    core.add(A, Prompt.of(prompt(5)), ENDLESS)
    core.add(B, Prompt.of(prompt(5, 200)), ENDLESS)
    (first,) = core.step()
    assert (first.key, first.token_ids) == (A, [5])
    assert core.num_steps_in_flight
    with pytest.raises(StepFailed) as caught:
        core.step()
    assert runner.num_launched == 2, "nothing is launched after what failed"
    assert caught.value.keys == runner.steps[1]
    core.check()
    assert run(core) == {A: positions(6, 11), B: positions(5)}


def test_what_was_launched_after_a_failed_step_is_void_and_its_own_requests_are_not_named() -> None:
    core, runner = new_core()
    runner.result_errors[2] = OSError("lost")
    core.add(A, Prompt.of(prompt(5)), ENDLESS)
    core.step()
    core.add(B, Prompt.of(prompt(6, 200)), ENDLESS)
    with pytest.raises(StepFailed) as caught:
        core.step()
    assert runner.steps == [[A], [A], [A, B]]
    assert caught.value.keys == [A]
    core.abort(A)
    core.check()
    assert run(core) == {B: positions(6)}


def test_both_failing_are_one_failure() -> None:
    core, runner = new_core()
    runner.result_errors.update({1: OSError("first"), 2: OSError("second")})
    core.add(A, Prompt.of(prompt(5)), ENDLESS)
    with pytest.raises(StepFailed) as caught:
        core.step()
    assert str(caught.value.__cause__) == "first"
    assert run(core) == {A: positions(5)}


def test_a_failed_launch_does_not_name_who_left_meanwhile() -> None:
    core, runner = new_core()
    runner.launch_errors[2] = OSError("no memory")
    runner.sample = lambda key, position: EOS if key == key_of("ends") else position
    core.add(key_of("ends"), Prompt.of(prompt(5)), UNTIL_EOS)
    core.add(key_of("aborted"), Prompt.of(prompt(5, 200)), ENDLESS)
    core.add(key_of("stays"), Prompt.of(prompt(5, 300)), ENDLESS)
    core.step()
    core.abort(key_of("aborted"))
    core.add(key_of("aborted"), Prompt.of(prompt(3, 400)), ENDLESS)
    with pytest.raises(StepFailed) as caught:
        core.step()
    assert runner.steps[1] == [key_of("ends"), key_of("aborted"), key_of("stays")]
    assert caught.value.keys == [key_of("stays")]
    core.check()


@pytest.mark.parametrize("is_at_launch", [False, True])
@pytest.mark.parametrize("number", [1, 2])
def test_a_lost_device_is_not_taken_for_a_failed_step(number: int, is_at_launch: bool) -> None:
    core, runner = new_core()
    errors = runner.launch_errors if is_at_launch else runner.result_errors
    errors[number] = DeviceFailed("the device is gone")
    core.add(A, Prompt.of(prompt(5)), ENDLESS)
    with pytest.raises(DeviceFailed, match="gone"):
        run(core)


def test_a_device_that_is_lost_at_a_launch_is_not_waited_for() -> None:
    core, runner = new_core()
    runner.launch_errors[2] = DeviceFailed("the device is gone")
    core.add(A, Prompt.of(prompt(5)), ENDLESS)
    with pytest.raises(DeviceFailed, match="gone"):
        core.step()
    assert len(runner.in_flight) == 1


def test_a_device_that_is_lost_beside_a_failed_step_is_not_hidden_by_it() -> None:
    core, runner = new_core()
    runner.result_errors.update({1: OSError("first"), 2: DeviceFailed("the device is gone")})
    core.add(A, Prompt.of(prompt(5)), ENDLESS)
    with pytest.raises(DeviceFailed, match="gone"):
        core.step()
