"""What a draft model has seen of each request, on a device that refuses to compute behind KV which is not there."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from baton.engine.attention.base import LayerStored
from baton.engine.cache.block_pool import BlockPool, pack_blocks
from baton.engine.cache.draft_coverage import DraftCoverage
from baton.engine.scheduler.proposer import FREE, Draft, Wanted
from baton.engine.scheduler.request import BlockCopy, Request
from baton.engine.scheduler.step import SampledToken, SampledTokens, Step
from baton.engine.speculation.draft_model.passes import DraftPasses
from baton.engine.speculation.draft_model.proposer import DraftModelProposer
from baton.wire.images import PromptImage
from baton.wire.messages.output import TokenLogprobs
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams
from baton.wire.step_cost import StepCost
from tests.engine.scheduler.simulation import EOS, Device, LaunchedStep, Simulation, continuation
from tests.request_keys import A, B

BLOCK_SIZE = 4
PARAMS = DecodingParams(max_tokens=30, ignore_eos=True)


class Guesser(Device):
    """Says what the model says with a chance of `share_right`, and how sure it is."""

    def __init__(self, share_right: float = 1.0, logprob: float = -0.1) -> None:
        super().__init__(BLOCK_SIZE)
        self.share_right, self.logprob = share_right, logprob
        self.steps: list[Step] = []

    def launch(self, step: Step, layer_stored: LayerStored | None = None) -> LaunchedStep:
        self.steps.append(step)
        launched = super().launch(step, layer_stored)
        right = launched.result()
        launched.tokens = {key: self._guess(tokens) for key, tokens in right.items()}
        self._launched.append(launched)  # to be collected by whoever launched it
        return launched

    def _guess(self, right: SampledTokens) -> SampledTokens:
        (token,) = right
        is_right = self.chance.random() < self.share_right
        token_id = token.token_id if is_right else (token.token_id + 1) % 50
        return (SampledToken(token_id, TokenLogprobs(self.logprob, (), ())),)


class Late:
    """A proposer that is made when the pool is there."""

    method, stores_kv = "draft_model", True
    proposer: DraftModelProposer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.proposer, name)


def proposer_of(
    guesser: Guesser, pool: BlockPool, *, num_tokens: int = 4, max_tokens: int = 10**6, max_step: int = 64
) -> DraftModelProposer:
    config = SimpleNamespace(eos_token_ids=(EOS,))
    draft = SimpleNamespace(num_tokens=num_tokens, max_tokens=max_tokens, is_greedy=False, config=config)
    passes = DraftPasses(guesser, max_step, BLOCK_SIZE)
    return DraftModelProposer(cast(Any, draft), passes, DraftCoverage(pool, BLOCK_SIZE))


def simulation_of(guesser: Guesser, **values: Any) -> Simulation:
    late = Late()
    simulation = Simulation(block_size=BLOCK_SIZE, proposer=late, **values)
    late.proposer = proposer_of(guesser, simulation.pool)
    return simulation


@pytest.mark.parametrize("share_right", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("seed", range(6))
def test_it_never_relies_on_draft_kv_that_is_not_there(
    seed: int, share_right: float, caplog: pytest.LogCaptureFixture
) -> None:
    """With preemptions, forks, handoffs, failed steps and found prefixes."""
    chance, guesser = random.Random(seed), Guesser(share_right)
    device = Device(BLOCK_SIZE, failure_rate=0.02, chance=random.Random(seed))
    simulation = simulation_of(guesser, num_blocks=chance.choice((14, 30)), device=device)
    prompts = [[chance.randrange(1, 50) for _ in range(chance.randrange(1, 18))] for _ in range(4)]
    expected = {}
    for number in range(0, 60, 2):
        prompt = chance.choice(prompts) + [chance.randrange(1, 50) for _ in range(chance.randrange(3))]
        params = replace(PARAMS, max_tokens=chance.randrange(2, 20))
        if chance.random() < 0.3 and simulation.add_computed(number, prompt, params):
            names = [number]
        else:
            forks = [number + 1] if chance.random() < 0.3 else []
            simulation.add(number, prompt, params, forks)
            names = [number, *forks]
        for choice, name in enumerate(names):
            limit = simulation.limits.max_request_tokens
            expected[name] = continuation(prompt, replace(params, choice=choice), limit)[0]
        for _ in range(chance.randrange(4)):
            simulation.step()
    simulation.run()
    assert {name: simulation.outputs[name] for name in expected} == expected
    assert "could not be computed" not in caplog.text  # else the device has refused
    assert len(guesser.steps) > 50
    counted = simulation.core.draft_counts.by_method()
    assert sum(counted[0].accepted_by_position) >= 30 * share_right


class Alone:
    """One request that decodes, whose blocks are there."""

    def __init__(self, guesser: Guesser, **values: Any) -> None:
        self.guesser, self.pool = guesser, BlockPool(99)
        self.proposer = proposer_of(guesser, self.pool, **values)

    def request(self, key: RequestKey, num_tokens: int) -> Request:
        request = Request(key, Prompt.of(range(1, num_tokens)), PARAMS, b"", 10**6, output_ids=(7,))
        request.block_table = pack_blocks(self.pool.allocate(12))
        return request

    def propose(self, *requests: Request, **values: Any) -> Sequence[Draft]:
        self.guesser.steps.clear()
        return self.proposer.propose([Wanted(request, 4, **values) for request in requests])

    @property
    def computed(self) -> list[Mapping[RequestKey, tuple[int, int]]]:
        """Of each pass the first token and the number of tokens of each request."""
        return [{share.key: (share.start, share.num_tokens) for share in step.shares} for step in self.guesser.steps]


def test_requests_share_passes_and_each_catches_up_in_the_first() -> None:
    alone = Alone(Guesser())
    first, second = alone.request(A, 9), alone.request(B, 5)
    drafts = alone.propose(first, second)
    assert [len(draft.token_ids) for draft in drafts] == [4, 4]
    assert alone.computed == [
        {A: (0, 9), B: (0, 5)},
        {A: (9, 1), B: (5, 1)},
        {A: (10, 1), B: (6, 1)},
        {A: (11, 1), B: (7, 1)},
    ]
    assert drafts[0].confidences == pytest.approx([0.905] * 4, abs=1e-3)


@pytest.mark.parametrize(("num_right", "begins"), [(4, (12, 2)), (3, (12, 1)), (2, (11, 1)), (0, (9, 1))])
def test_what_came_true_is_not_computed_again(num_right: int, begins: tuple[int, int]) -> None:
    alone = Alone(Guesser())
    request = alone.request(A, 9)
    (draft,) = alone.propose(request)
    request.token_ids += [*draft.token_ids[:num_right], 49]
    alone.propose(request)
    assert alone.computed[0] == {A: begins}


def test_a_step_that_failed_is_drafted_again() -> None:
    alone = Alone(Guesser())
    request = alone.request(A, 9)
    found = [alone.propose(request) for _ in range(2)]
    assert found[0] == found[1]
    assert alone.computed[0] == {A: (8, 1)}


def test_a_request_that_lost_its_blocks_begins_anew() -> None:
    alone = Alone(Guesser())
    request = alone.request(A, 9)
    alone.propose(request)
    alone.pool.release(request.block_table)
    request.block_table = pack_blocks(alone.pool.allocate(12))
    alone.propose(request)
    assert alone.computed[0] == {A: (0, 9)}


def test_it_ends_where_a_chance_is_too_small_and_behind_the_end() -> None:
    alone = Alone(Guesser(logprob=-0.7))  # a chance of a half
    (draft,) = alone.propose(alone.request(A, 9), least_chance=0.3)
    assert len(draft.token_ids) == 2
    ending = alone.request(B, 5)
    ending.params = replace(PARAMS, ignore_eos=False)
    while len(ending.token_ids) < 40:
        (draft,) = alone.propose(ending)
        assert EOS not in draft.token_ids[:-1]
        ending.token_ids += draft.token_ids


def test_a_long_prompt_takes_several_steps_and_no_pass_is_too_large() -> None:
    alone = Alone(Guesser(), max_step=36)
    first, second = alone.request(A, 44), alone.request(B, 44)
    sizes, found = [], []
    for _ in range(4):
        found.append(alone.propose(first, second))
        sizes.append(alone.computed[0])
    assert sizes == [
        {A: (0, 32), B: (0, 4)},
        {A: (32, 12), B: (4, 20)},
        {A: (43, 1), B: (24, 20)},
        {A: (43, 1), B: (43, 1)},
    ]
    assert [[len(draft.token_ids) for draft in drafts] for drafts in found] == [[0, 0], [4, 0], [4, 4], [4, 4]]


def test_blocks_that_others_read_are_left_alone() -> None:
    alone = Alone(Guesser())
    first, second = alone.request(A, 9), alone.request(B, 9)
    alone.proposer._coverage.is_read = {first.block_table[1]}.__contains__
    assert [len(draft.token_ids) for draft in alone.propose(first, second)] == [0, 4]
    assert alone.computed[0] == {B: (0, 9)}


def test_who_cannot_be_followed_is_not() -> None:
    alone = Alone(Guesser(), max_tokens=12)
    assert alone.proposer.follows(alone.request(A, 11))
    assert not alone.proposer.follows(alone.request(A, 12))
    (draft,) = alone.propose(alone.request(A, 10))
    assert len(draft.token_ids) == 2
    copying, seeing = alone.request(A, 9), alone.request(B, 9)
    copying.block_copy = BlockCopy(1, 2)
    assert not alone.proposer.follows(copying)
    image = PromptImage(2, 3, b"d" * 16, b"", 1, 1)
    seeing.prompt = replace(seeing.prompt, media=(image,))
    assert not alone.proposer.follows(seeing)


def test_a_draft_costs_its_passes_and_what_is_to_be_caught_up_with() -> None:
    alone = Alone(Guesser())
    request = alone.request(A, 41)
    assert alone.proposer.cost(request) == FREE  # not known yet
    alone.proposer._passes.costs.cost = StepCost(0.01, 0.001, 0.0, 0.002, 0.0)
    found = alone.proposer.cost(request)
    assert found == pytest.approx((0.051, 0.012))
    for _ in range(2):
        alone.propose(request)
    assert alone.proposer.cost(request) == pytest.approx((0.0, 0.012))
