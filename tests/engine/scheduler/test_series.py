"""Steps of a series: they are those that the scheduler would choose, and their outputs those that it would find."""

from __future__ import annotations

import pytest

from baton.engine.scheduler.request import RequestOutput, Step
from baton.wire.sampling import DecodingParams
from tests.engine.scheduler.simulation import Simulation
from tests.engine.scheduler.test_asynchronous import endless, simulate


def watched(simulation: Simulation, *, has_series: bool = True) -> tuple[list[Step], list[RequestOutput]]:
    """The steps and the outputs of `simulation` from now on. Each step of a series is compared with what the scheduler
    chooses as it looks at every request; without `has_series` none goes on."""
    steps: list[Step] = []
    outputs: list[RequestOutput] = []
    step, note, check = simulation.step, simulation._note, simulation._check_step

    def stepped() -> Step:
        if not has_series:
            simulation.scheduler.requests.num_changes += 1
        return step()

    def noted(output: RequestOutput) -> None:
        outputs.append(output)
        note(output)

    def checked(step: Step) -> None:
        steps.append(step)
        if step.number:
            decoding, prompts = simulation.scheduler.requests.by_age()
            assert step.requests == tuple(request.share(1) for request in decoding)
            assert not prompts
            assert not simulation.scheduler.requests.num_waiting
        check(step)

    simulation.step, simulation._note, simulation._check_step = stepped, noted, checked  # type: ignore[method-assign]
    return steps, outputs


@pytest.mark.parametrize("failure_rate", [0.0, 0.05])
@pytest.mark.parametrize("seed", range(8))
def test_random_traffic_has_the_same_outputs_with_series_and_without(seed: int, failure_rate: float) -> None:
    found = []
    for has_series in (True, False):
        run, traffic = simulate(seed, failure_rate)
        steps, outputs = watched(run.simulation, has_series=has_series)
        assert run.serve(traffic) == run.expected
        assert any(step.number for step in steps) == has_series
        found.append(([step.requests for step in steps], outputs, run.simulation.num_failures))
    assert found[0] == found[1]


def decoding(num_requests: int = 3, num_blocks: int = 64) -> tuple[Simulation, list[Step]]:
    simulation = Simulation(block_size=4, num_blocks=num_blocks)
    for name in range(num_requests):
        simulation.add(name, list(range(10 * name, 10 * name + 3 + name)), endless(20))
    steps, _ = watched(simulation)
    while len(steps) < 3 or not steps[-1].number:
        simulation.step()
    return simulation, steps


def numbers(steps: list[Step]) -> list[int]:
    return [step.number for step in steps]


def test_a_series_goes_on_until_a_request_ends() -> None:
    simulation, steps = decoding()
    first = steps[-1].series
    simulation.run()
    assert numbers([step for step in steps if step.series is first]) == list(range(19))
    assert steps[-1].series is first


def test_a_new_request_an_abort_and_a_step_that_fails_end_a_series() -> None:
    simulation, steps = decoding()

    def fail() -> None:
        simulation.device.failure_rate = 1.0
        simulation.step()

    def add() -> None:
        simulation.add("new", [7, 7], endless(40))

    for disturb in (add, lambda: simulation.abort(1), fail):
        last = steps[-1].series
        disturb()
        simulation.device.failure_rate = 0.0
        simulation.step()
        simulation.step()
        assert steps[-1].series is not last
        simulation.step()
        assert steps[-1].number


def test_without_a_block_for_the_next_token_requests_are_preempted_as_ever() -> None:
    simulation, steps = decoding(2, num_blocks=6)
    simulation.run()
    assert simulation.scheduler.num_preemptions
    assert max(numbers(steps)) > 4


def test_a_stop_token_that_is_no_end_yet_ends_no_series() -> None:
    simulation = Simulation()
    # every token is among those at which the request may end, but not before the last
    params = DecodingParams(max_tokens=12, min_tokens=12, stop_token_ids=tuple(range(50)))
    simulation.add("a", [1, 2, 3], params)
    steps, outputs = watched(simulation)
    simulation.run()
    assert numbers(steps) == [0, *range(11)]
    assert [output.finish_reason for output in outputs] == [*[""] * 11, "stop"]
