"""What steps cost is found out from steps."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import astuple

import numpy as np
import pytest

from baton.engine.scheduler.request import ScheduledRequest
from baton.engine.scheduler.step import Step
from baton.engine.scheduler.step_costs import USUAL_PAIR, StepCosts, work_of
from baton.wire.images import PromptImage
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams
from baton.wire.step_cost import SMALLEST_CHUNK, StepCost, StepWork

TRUE = StepCost(1e-3, 2e-4, 5e-8, 1e-4, 2e-8)
PAIR = TRUE.prompt_pair_s / TRUE.prompt_token_s
KEY, PARAMS = RequestKey.numbered(0), DecodingParams()
TOKEN_IDS = tuple(range(10_000))


def share(start: int, num_tokens: int, *images: PromptImage) -> ScheduledRequest:
    prompt = Prompt(TOKEN_IDS[: start + num_tokens], media=images)
    return ScheduledRequest(KEY, start, num_tokens, prompt.token_ids, prompt, (), PARAMS, True)


def step(prompts: list[tuple[int, int]], contexts: list[int]) -> Step:
    return Step(tuple(share(*each) for each in prompts) + tuple(share(context, 1) for context in contexts))


class Machine:
    """Steps take what `cost` says, times a factor."""

    def __init__(self, cost: StepCost = TRUE, pair_in_tokens: float = USUAL_PAIR) -> None:
        self.now_s = 0.0
        self.cost = cost
        self.costs = StepCosts(lambda: self.now_s, pair_in_tokens)

    def run(self, each: Step, factor: float = 1.0) -> None:
        self.costs.launched(each)
        self.now_s += self.cost.seconds(work_of(each)) * factor
        self.costs.collected()

    def mix(self, num_steps: int, chance: random.Random, noise: float = 0.0, prompts: bool = True) -> None:
        for number in range(num_steps):
            contexts = [chance.randrange(100, 4000) for _ in range(chance.randrange(1, 12))]
            chunk = [(chance.randrange(0, 2000), chance.randrange(2, 512))] if prompts and number % 3 == 0 else []
            self.run(step(chunk, contexts), 1 + noise * chance.uniform(-1, 1))


CASES = [step([(0, 512)], []), step([(512, 300)], [700] * 8), step([], [2000]), step([], [500] * 30)]


def worst_error(found: StepCost | None, true: StepCost = TRUE) -> float:
    assert found is not None
    return max(abs(found.seconds(work_of(each)) / true.seconds(work_of(each)) - 1) for each in CASES)


@pytest.mark.parametrize("factor", [0.25, 1.0, 10.0])
def test_predictions_come_close_after_some_hundred_steps_whatever_was_expected(factor: float) -> None:
    machine = Machine(pair_in_tokens=factor * PAIR)
    machine.mix(600, random.Random(1), noise=0.1)
    assert worst_error(machine.costs.cost) < 0.1
    assert machine.costs.relative_error < 0.15


@pytest.mark.parametrize("num_tokens", [128, 512])
def test_long_prompts_are_expected_of_short_ones_of_one_length_by_what_the_model_is(num_tokens: int) -> None:
    machine, chance = Machine(pair_in_tokens=PAIR), random.Random(6)
    for number in range(200):
        chunk = [(0, num_tokens)] if number % 3 == 0 else []
        machine.run(step(chunk, [num_tokens] * chance.randrange(1, 12)), 1 + 0.1 * chance.uniform(-1, 1))
    assert machine.costs.cost is not None
    expected = TRUE.prompt_s(4000, 0, 512, 0, 0)
    assert machine.costs.cost.prompt_s(4000, 0, 512, 0, 0) == pytest.approx(expected, rel=0.1)


def test_a_step_that_computes_images_teaches_nothing_and_one_behind_them_does() -> None:
    machine, chance = Machine(), random.Random(5)
    machine.mix(600, chance)
    known = machine.costs.cost
    image = PromptImage(10, 5, b"i" * 16, b"", 28, 28)
    seeing = share(0, 12, image)
    for _ in range(100):
        machine.run(Step((seeing,)), 100.0)
        machine.run(Step((seeing, share(10, 20))), 100.0)
    assert machine.costs.cost == known
    behind = Step((share(15, 12, image),))
    for _ in range(100):
        machine.run(behind, 100.0)
    assert machine.costs.cost != known


def test_a_step_that_took_a_hundred_times_as_long_changes_little() -> None:
    machine, chance = Machine(), random.Random(2)
    machine.mix(600, chance)
    machine.run(CASES[1], 100.0)
    machine.mix(64, chance)
    assert worst_error(machine.costs.cost) < 0.1


def test_steps_that_became_slower_are_followed() -> None:
    machine, chance = Machine(), random.Random(3)
    machine.mix(600, chance)
    slower = StepCost(*(10 * each for each in (1e-3, 2e-4, 5e-8, 1e-4, 2e-8)))
    machine.cost = slower
    machine.mix(1000, chance)
    assert worst_error(machine.costs.cost, slower) < 0.15


def test_the_cost_of_prompts_is_kept_while_there_are_none() -> None:
    machine, chance = Machine(), random.Random(4)
    machine.mix(600, chance)
    machine.mix(4000, chance, prompts=False)
    assert worst_error(machine.costs.cost) < 0.1


def test_without_any_prompt_its_cost_is_not_known() -> None:
    machine = Machine()
    machine.mix(600, random.Random(5), prompts=False)
    assert machine.costs.cost is not None
    assert not machine.costs.cost.knows_prompts


def test_the_first_prompt_that_comes_late_is_believed_at_once() -> None:
    """As on a machine so busy that nothing with a prompt could be tried before the first request."""
    machine = Machine()
    machine.mix(2, random.Random(4), prompts=False)
    machine.costs.know()
    assert machine.costs.cost is not None
    assert not machine.costs.cost.knows_prompts
    machine.run(step([(0, 512)], []))
    assert machine.costs.cost.seconds(work_of(CASES[0])) == pytest.approx(TRUE.seconds(work_of(CASES[0])), rel=0.1)


def test_steps_that_overlap_are_timed_one_after_the_other() -> None:
    now_s = 0.0
    costs = StepCosts(lambda: now_s)
    costs.launched(step([], [100]))
    for _ in range(400):
        costs.launched(step([], [100]))
        now_s += 0.01
        costs.collected()
    assert costs.cost is not None
    assert costs.cost.seconds(work_of(step([], [100]))) == pytest.approx(0.01, rel=0.02)


def test_a_step_of_a_series_is_known_by_its_number_of_requests_and_their_contexts() -> None:
    shares = (share(100, 1), share(200, 1))
    assert work_of(Step(shares, series=object(), number=3, context=306)) == StepWork(0, 0, 2, 306)


def test_drafts_count_as_requests_that_decode_over_one_context() -> None:
    drafted = share(100, 1).with_drafts([5, 6, 7])
    assert work_of(Step((drafted, share(200, 1)))) == StepWork(0, 0, 5, 300)
    assert work_of(Step((drafted, share(10, 4)))) == StepWork(4, 50, 4, 100)


def steps_until_a_fit(machine: Machine, each: Step) -> int:
    """How many such steps it takes until costs are found anew."""
    before = machine.costs.cost
    for number in range(1, 1000):
        machine.run(each)
        if machine.costs.cost is not before:
            return number
    raise AssertionError("nothing is learned")


def test_of_steps_without_much_of_a_prompt_one_of_four_teaches_behind_the_first() -> None:
    machine = Machine()
    decoding, chunk, forced = step([], [100, 200]), step([(0, 64)], [100]), step([(0, SMALLEST_CHUNK)], [100])
    assert steps_until_a_fit(machine, decoding) == 16
    assert steps_until_a_fit(machine, decoding) == 4 * 16
    assert (steps_until_a_fit(machine, chunk), steps_until_a_fit(machine, chunk)) == (1, 15)
    assert steps_until_a_fit(machine, forced) == 4 * 16
    assert steps_until_a_fit(machine, chunk) == 16


def test_how_long_the_oldest_step_takes_is_expected_as_far_as_it_is_known() -> None:
    machine, chance = Machine(), random.Random(6)
    costs = machine.costs
    assert costs.expected_s is None
    costs.launched(step([], [100]))
    assert costs.expected_s is None, "nothing is known"
    costs.lost()
    machine.mix(600, chance, prompts=False)
    assert costs.cost is not None
    assert costs.expected_s is None, "nothing is in flight"
    costs.launched(step([], [100]))
    costs.launched(step([(0, 50)], []))
    assert costs.expected_s == costs.cost.seconds(work_of(step([], [100])))
    costs.collected()
    assert costs.expected_s is None, "no prompt was seen"
    costs.lost()
    machine.mix(600, chance)
    costs.launched(step([(0, 50)], []))
    assert costs.expected_s == costs.cost.seconds(work_of(step([(0, 50)], [])))
    costs.lost()
    assert costs.expected_s is None


@pytest.mark.parametrize("start", [0, 100, 5000])
@pytest.mark.parametrize("seconds", [0.001, 0.02, 1.0])
def test_a_chunk_takes_the_time_that_it_may(start: int, seconds: float) -> None:
    chunk = TRUE.chunk_within(seconds, start)

    def time_of(num_tokens: int) -> float:
        return TRUE.seconds(work_of(Step((share(start, num_tokens),)))) - TRUE.step_s

    assert chunk < 2 or time_of(chunk) <= seconds
    assert time_of(max(chunk + 1, 2)) > seconds


def test_the_time_of_a_prompt_is_that_of_its_chunks() -> None:
    chunks = [step([(40 + first, 100)], [700, 900]) for first in range(0, 500, 100)]
    assert TRUE.prompt_s(500, 40, 100, 2, 1600) == pytest.approx(sum(TRUE.seconds(work_of(each)) for each in chunks))


def test_a_step_counts_tokens_and_pairs_of_prompts_and_requests_and_contexts_of_the_others() -> None:
    assert work_of(step([(10, 5), (0, 2)], [100, 200, 7])) == StepWork(7, 5 * 10 + 15 + 3, 3, 307)
    assert work_of(step([], [100])) == StepWork(0, 0, 1, 100)


def fit_of_least_squares(
    rows: Sequence[tuple[StepWork, float]], pair_in_tokens: float, zero: Collection[int]
) -> list[float]:
    """The parameters of a `StepCost` for steps and their seconds, the newest last: least squares over relative errors,
    with what is expected of pairs as one more equation. `zero`: those that would be negative."""
    scales, ages = np.array([1.0, 64.0, 65536.0, 8.0, 8192.0]), np.arange(len(rows))[::-1]
    weights = 0.998 ** (ages / 2)
    matrix = np.array([np.array((1, *work)) / scales / seconds for work, seconds in rows]) * weights[:, None]
    free, expected = [number for number in range(5) if number not in zero], pair_in_tokens * 65536 / 64
    token_square = float((matrix[:, 1] ** 2).sum())
    found, token, more = np.zeros(5), matrix[:, 1].sum() / token_square, np.zeros(5)
    for _ in range(50):
        if not {1, 2} & set(zero):
            more = np.array([0, -1 / token, 1 / (expected * token), 0, 0])
            more *= min(0.1, 0.03 * token_square * token**2) ** 0.5
        equations, wanted = np.vstack([matrix, more]), np.append(weights, 0.0)
        found[free] = np.linalg.lstsq(equations[:, free], wanted, rcond=None)[0]
        token = found[1]
    return list(found / scales)


@pytest.mark.parametrize(
    ("cost", "num_prompts", "zero"),
    [
        (StepCost(1e-3, 4e-4, 5e-8, 1e-3, 1e-7), 12, None),
        (StepCost(0.02, 2e-4, 5e-8, 2e-3, 1e-6), 2, None),
        (StepCost(0.2, 5e-4, -4e-7, 2e-3, 1e-6), 12, 2),
        (StepCost(0.3, -9e-4, 3e-6, 2e-3, 1e-6), 12, 1),
    ],
    ids=["many prompts", "few prompts", "pairs that cost nothing", "tokens that cost nothing"],
)
def test_costs_are_those_of_the_least_squares(cost: StepCost, num_prompts: int, zero: int | None) -> None:
    machine, chance, rows = Machine(cost, 3 * PAIR), random.Random(7), []
    for number in range(16):
        chunk = [(chance.randrange(0, 1000), chance.randrange(17, 300))] if number < num_prompts else []
        each = step(chunk, [chance.randrange(100, 8000) for _ in range(chance.randrange(1, 12))])
        factor = 1 + 0.01 * chance.uniform(-1, 1)
        machine.run(each, factor)
        rows.append((work_of(each), cost.seconds(work_of(each)) * factor))
    for _ in range(400):
        machine.costs.know()
    assert machine.costs.cost is not None
    found = astuple(machine.costs.cost)
    zeros = [number for number, each in enumerate(found) if each == 0.0]
    assert zero is None or zero in zeros
    assert found == pytest.approx(fit_of_least_squares(rows, 3 * PAIR, zeros), rel=1e-6)


def of_one_kind(rows: Sequence[tuple[float, float]]) -> float:
    """What a step is predicted to take when all were alike; of each its weight and its seconds."""
    return sum(weight / s for weight, s in rows) / sum(weight / s**2 for weight, s in rows)


def taking(machine: Machine, seconds: float) -> None:
    """Run a step of one kind that takes so long."""
    machine.costs.launched(step([], [100, 200]))
    machine.now_s += seconds
    machine.costs.collected()


def predicted_s(machine: Machine) -> float:
    machine.costs.know()
    assert machine.costs.cost is not None
    return machine.costs.cost.seconds(work_of(step([], [100, 200])))


@pytest.mark.parametrize("seconds", [0.004, 40.0])
def test_what_steps_do_not_tell_apart_counts_as_the_cost_of_requests(seconds: float) -> None:
    machine = Machine()
    taking(machine, seconds)
    assert predicted_s(machine) == pytest.approx(seconds)
    assert machine.costs.cost is not None
    assert astuple(machine.costs.cost) == pytest.approx((0.0, 0.0, 0.0, seconds / 2, 0.0), abs=1e-9)


def test_of_a_model_of_which_nothing_is_known_a_pair_is_a_small_part_of_a_token() -> None:
    machine = Machine()
    machine.run(step([(0, 100)], []))
    machine.costs.know()
    assert machine.costs.cost is not None
    assert 0.0 < machine.costs.cost.prompt_pair_s < 1e-3 * machine.costs.cost.prompt_token_s


def test_older_steps_count_less_and_much_less_while_predictions_are_wrong() -> None:
    for error, kept in ((0.0, 0.998), (0.7, 0.95)):
        machine = Machine()
        times = [0.01] * 8 + [0.015] * 7
        machine.costs.relative_error = error
        for seconds in times:
            taking(machine, seconds)
        weighted = [(kept ** (len(times) - 1 - number), seconds) for number, seconds in enumerate(times)]
        assert predicted_s(machine) == pytest.approx(of_one_kind(weighted), rel=1e-9)


@pytest.mark.parametrize(("factor", "counts_as"), [(100.0, 3.0), (2.5, 2.5), (0.4, 0.4), (0.01, 1 / 3)])
def test_a_step_counts_as_three_times_its_prediction_or_a_third_of_it_at_most(factor: float, counts_as: float) -> None:
    machine = Machine()
    taking(machine, 0.01)
    assert predicted_s(machine) == pytest.approx(0.01)
    taking(machine, 0.01 * factor)
    assert predicted_s(machine) == pytest.approx(of_one_kind([(0.998, 0.01), (1.0, 0.01 * counts_as)]), rel=1e-6)


def test_the_error_of_predictions_follows_each_step_by_a_fiftieth() -> None:
    machine = Machine()
    taking(machine, 0.01)
    assert machine.costs.relative_error == 0.0, "nothing was predicted"
    expected, factors = 0.0, (0.5, 1.0, 1.25, 0.01)
    for factor, error in zip(factors, (1.0, 0.0, 0.2, 1.0), strict=True):
        taking(machine, predicted_s(machine) * factor)
        expected += 0.02 * (error - expected)
        assert machine.costs.relative_error == pytest.approx(expected, rel=1e-6)


def test_steps_that_take_no_time_that_can_be_measured_are_taken_for_a_microsecond() -> None:
    machine = Machine()
    taking(machine, 0.0)
    assert predicted_s(machine) == pytest.approx(1e-6)
    machine = Machine()
    machine.costs.know()
    taking(machine, 1.0)
    assert predicted_s(machine) == pytest.approx(3e-6), "nothing was known, and a prediction is raised three times"
