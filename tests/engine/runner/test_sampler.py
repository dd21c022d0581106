from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from baton.device.host import HostDevice
from baton.engine.runner.drawing import INVERSE, RACE, Drawing
from baton.engine.runner.sampled_rows import uniform_noise
from baton.engine.runner.sampler import Sampler
from baton.engine.scheduler.request import ScheduledRequest
from baton.engine.scheduler.step import SampledToken
from baton.wire.sampling import DecodingParams
from tests.engine.runner.relay import scheduled
from tests.request_keys import A

VOCAB_SIZE = 40
EOS = 39
LOWEST = torch.finfo(torch.float32).min
Floats = npt.NDArray[np.float64]


def random_logits(seed: int = 0, rows: int = 1, vocab_size: int = VOCAB_SIZE) -> Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 2


def request(prompt: tuple[int, ...] = (1, 2), output: tuple[int, ...] = (), **params: Any) -> ScheduledRequest:
    token_ids = [*prompt, *output]
    return scheduled(A, len(token_ids) - 1, 1, token_ids, len(prompt), [0], DecodingParams(**params))


def sample_rows(
    logits: Tensor, requests: Sequence[ScheduledRequest], drawing: Drawing = INVERSE
) -> list[SampledToken | None]:
    """One token per row, or None; changes `logits`."""
    device = HostDevice()
    sampler = Sampler(frozenset({EOS}), logits.shape[1], drawing=drawing)
    staging = device.staging(0)
    plan = sampler.plan(requests, staging).stage_changes(staging)
    return plan.tokens(device.fetch(sampler.sample(plan, logits)).wait())


def sample(logits: Tensor, *requests: ScheduledRequest, drawing: Drawing = INVERSE) -> list[SampledToken]:
    return [token for token in sample_rows(logits.clone(), requests, drawing) if token is not None]


def sampled_counts(logits: Tensor, num_samples: int, drawing: Drawing = INVERSE, **params: Any) -> Counter[int]:
    """Tokens sampled from one row of logits with different seeds."""
    requests = [request(seed=seed, **params) for seed in range(num_samples)]
    return Counter(token.token_id for token in sample(logits.expand(num_samples, -1), *requests, drawing=drawing))


def reference_probabilities(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Floats:
    """Temperature, top-k, top-p, min-p, each as its paper says, on a plain vector."""
    scaled = logits[0].double().numpy() / temperature
    order = np.argsort(-scaled, kind="stable")
    kept = order[:top_k] if top_k > 0 else order
    weights = np.exp(scaled[kept] - scaled[kept].max())
    weights /= weights.sum()
    nucleus = int(np.searchsorted(np.cumsum(weights), top_p)) + 1
    kept, weights = kept[:nucleus], weights[:nucleus]
    weights = np.where(weights < min_p * weights.max(), 0.0, weights)
    probabilities = np.zeros(len(scaled))
    probabilities[kept] = weights / weights.sum()
    return probabilities


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_of_nan_samples_nothing_and_changes_no_other_row(temperature: float) -> None:
    logits = random_logits(rows=3)
    logits[1, 7] = torch.nan
    found = sample_rows(logits.clone(), [request(temperature=temperature, seed=1)] * 3)
    assert found[1] is None
    assert [found[0], found[2]] == sample(logits[[0, 2]], *[request(temperature=temperature, seed=1)] * 2)


def test_temperature_zero_takes_the_most_likely_token() -> None:
    logits = random_logits(rows=5)
    found = sample(logits, *[request(temperature=0, top_k=3, seed=seed) for seed in range(5)])
    assert [token.token_id for token in found] == logits.argmax(-1).tolist()


def test_top_k_one_and_a_tiny_top_p_are_greedy() -> None:
    logits = random_logits()
    best = int(logits.argmax())
    assert (
        sampled_counts(logits, 50, top_k=1, temperature=2.0)
        == sampled_counts(logits, 50, top_p=1e-9, temperature=2.0)
        == {best: 50}
    )


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-5])
def test_the_smallest_temperatures_are_greedy(temperature: float) -> None:
    logits = random_logits()
    assert sampled_counts(logits, 5, temperature=temperature) == {int(logits.argmax()): 5}


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(5, 1.0, 0.0), (-1, 0.6, 0.0), (0, 1.0, 0.2), (12, 0.7, 0.1), (100, 0.9, 0.0)]
)
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
@pytest.mark.parametrize("drawing", [INVERSE, RACE], ids=["inverse", "race"])
def test_samples_follow_the_truncated_distribution(
    drawing: Drawing, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    num_samples, logits = 3000, random_logits(seed=3)
    expected = reference_probabilities(logits, temperature, top_k, top_p, min_p)
    found = sampled_counts(logits, num_samples, drawing, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert set(found) <= set(np.flatnonzero(expected).tolist())
    assert {int(token) for token in np.flatnonzero(expected > 0.01)} <= set(found)
    large = np.flatnonzero(expected * num_samples >= 5).tolist()
    squares = [(found[token] - expected[token] * num_samples) ** 2 / (expected[token] * num_samples) for token in large]
    # mean of chi-square is its degrees of freedom n, deviation sqrt(2 n): five deviations never happen by chance
    assert sum(squares) < len(large) + 5 * np.sqrt(2 * len(large))


@pytest.mark.parametrize(
    ("params", "num_kept"),
    [
        ({"top_k": 4, "top_p": 0.85}, 3),  # 0.85 of the four, not of all, of which it takes four
        ({"top_p": 0.85, "min_p": 0.2}, 4),  # 0.85 of all, not of the four that min_p keeps, of which it takes three
        ({"top_k": 3, "top_p": 0.99, "min_p": 0.2}, 3),
        ({"temperature": 2.0, "min_p": 0.55}, 3),  # min_p looks at what the temperature has made
        ({"temperature": 2.0, "top_p": 0.72}, 4),
    ],
)
def test_temperature_top_k_top_p_and_min_p_are_applied_in_the_documented_order(
    params: dict[str, Any], num_kept: int
) -> None:
    logits = torch.tensor([[0.45, 0.22, 0.14, 0.11, 0.08]]).log()
    assert set(sampled_counts(logits, 300, **params)) == set(range(num_kept))


def test_penalties_come_before_the_temperature() -> None:
    logits = torch.tensor([[1.0, 0.5]])
    params = {"temperature": 0.1, "min_p": 0.5, "presence_penalty": 0.8}
    requests = [request(prompt=(1,), output=(0,), seed=seed, **params) for seed in range(50)]
    assert {token.token_id for token in sample(logits.expand(50, -1), *requests)} == {1}


def test_noise_is_uniform_and_depends_on_all_its_arguments() -> None:
    noises = [uniform_noise(*arguments) for arguments in itertools.product(range(20), range(10), range(20))]
    assert len(set(noises)) == len(noises)
    assert min(noises) >= 0.0
    assert max(noises) < 1.0
    counts, _ = np.histogram(noises, bins=10, range=(0, 1))
    assert ((counts - 400) ** 2 / 400).sum() < 9 + 5 * np.sqrt(18)
    assert uniform_noise(-(2**63), 2**16, 2**40) == uniform_noise(-(2**63), 2**16, 2**40)


def test_a_token_depends_on_seed_choice_and_position_alone() -> None:
    logits = random_logits().expand(3, -1)
    by_seed = [sample(logits[:1], request(seed=seed))[0].token_id for seed in range(40)]
    by_choice = [sample(logits[:1], request(seed=1, choice=choice))[0].token_id for choice in range(40)]
    by_position = [sample(logits[:1], request(seed=1, output=(0,) * count))[0].token_id for count in range(40)]
    assert min(len(set(by_seed)), len(set(by_choice)), len(set(by_position))) > 5
    prompts = [sample(logits[:1], request((7,) * length, (3,), seed=1))[0].token_id for length in range(1, 9)]
    assert len(set(prompts)) == 1


def test_neighbours_in_the_batch_do_not_matter() -> None:
    choose = random.Random(0)
    logits = random_logits(seed=5, rows=12)
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0}, {"top_k": 3}, {"top_p": 0.5}, {"presence_penalty": 1.0}]
    requests = [request(output=tuple(range(row)), seed=row, **kinds[row % len(kinds)]) for row in range(12)]
    alone = [sample(logits[row : row + 1], requests[row])[0] for row in range(12)]
    for _ in range(5):
        rows = choose.sample(range(12), 7)
        assert sample(logits[rows], *[requests[row] for row in rows]) == [alone[row] for row in rows]


def adjusted(logits: Tensor, **arguments: Any) -> Tensor:
    """Logits after everything that comes before the sample_rows."""
    changed = logits.clone()
    sample_rows(changed, [request(temperature=0, **arguments)])
    return changed


@pytest.mark.parametrize("penalty", [0.5, 1.3, 2.0])
def test_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    logits, prompt, output = random_logits(), (1, 2, 2, 9), (5, 9)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([[*prompt, *output]]), logits.clone())
    found = adjusted(logits, prompt=prompt, output=output, repetition_penalty=penalty)
    torch.testing.assert_close(found, expected)


def test_presence_and_frequency_count_the_output_alone() -> None:
    logits = random_logits()
    found = adjusted(logits, prompt=(1, 2, 2), output=(5, 6, 5), presence_penalty=0.5, frequency_penalty=-0.25)
    expected = logits.clone()
    expected[0, 5] += -0.5 + 2 * 0.25
    expected[0, 6] += -0.5 + 0.25
    torch.testing.assert_close(found, expected)


def test_bias_is_added_before_penalties() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    bias: dict[str, Any] = {"logit_bias_ids": (1, 3), "logit_bias_values": (4.0, -100.0)}
    found = adjusted(logits, prompt=(1,), repetition_penalty=2.0, **bias)
    assert found[0, :4].tolist() == [0.0, 2.0, 0.0, -100.0]


def test_a_token_that_is_biased_away_is_never_sampled() -> None:
    logits = torch.zeros(1, 4)
    assert set(sampled_counts(logits, 200, logit_bias_ids=(0, 1), logit_bias_values=(-100.0, -100.0))) == {2, 3}


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_ends_are_withheld_until_min_tokens(ignore_eos: bool) -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    arguments: dict[str, Any] = {"min_tokens": 3, "stop_token_ids": (4,), "ignore_eos": ignore_eos}
    early = adjusted(logits, output=(8, 8), **arguments)
    assert early[0, 4] == LOWEST
    assert bool(early[0, EOS] == LOWEST) is not ignore_eos
    assert torch.equal(adjusted(logits, output=(8, 8, 8), **arguments), logits)


def test_only_allowed_tokens_are_sampled() -> None:
    logits = random_logits()
    assert set(sampled_counts(logits, 300, allowed_token_ids=(3, 9, 21))) == {3, 9, 21}
    best = max((3, 9, 21), key=lambda token_id: float(logits[0, token_id]))
    assert [token.token_id for token in sample(logits, request(temperature=0, allowed_token_ids=(3, 9, 21)))] == [best]


def test_a_row_of_allowed_tokens_changes_no_other_row() -> None:
    logits = random_logits(rows=3)
    requests = [request(seed=1), request(seed=1, allowed_token_ids=(5,)), request(seed=1, allowed_token_ids=(6, 7))]
    found = [token.token_id for token in sample(logits, *requests)]
    assert found[0] == sample(logits[:1], request(seed=1))[0].token_id
    assert found[1] == 5
    assert found[2] in (6, 7)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_withheld_gives_way_when_nothing_else_is_allowed(temperature: float) -> None:
    options: dict[str, Any] = {"temperature": temperature, "allowed_token_ids": (EOS, 7), "bad_word_ids": ((7,),)}
    logits = random_logits()
    assert [token.token_id for token in sample(logits, request(min_tokens=0, **options))] == [EOS]
    found = {sample(logits, request(seed=seed, min_tokens=5, **options))[0].token_id for seed in range(40)}
    assert found <= {EOS, 7}


@pytest.mark.parametrize(
    ("output", "withheld"),
    [((), {4}), ((5,), {4, 6}), ((9, 5, 6), {4, 7}), ((5, 6, 9), {4}), ((5, 5), {4, 6}), ((6,), {4})],
)
def test_the_end_of_a_bad_word_is_withheld_behind_its_beginning(output: tuple[int, ...], withheld: set[int]) -> None:
    found = adjusted(torch.zeros(1, VOCAB_SIZE), prompt=(5, 6), output=output, bad_word_ids=((4,), (5, 6), (5, 6, 7)))
    assert set(torch.nonzero(found[0] == LOWEST).flatten().tolist()) == withheld


def test_logprobs_are_of_the_models_own_distribution() -> None:
    logits = random_logits()
    expected = torch.log_softmax(logits[0], dim=-1)
    options: dict[str, Any] = {"temperature": 0.5, "top_k": 3, "presence_penalty": 2.0, "logit_bias_ids": (3,)}
    token = sample(logits, request(output=(1,), logprobs=4, logit_bias_values=(50.0,), seed=1, **options))[0]
    assert token.token_id == 3
    assert token.logprobs is not None
    assert token.logprobs.logprob == pytest.approx(float(expected[3]))
    assert token.logprobs.top_ids == tuple(expected.topk(4).indices.tolist())
    assert token.logprobs.top_logprobs == pytest.approx(expected.topk(4).values.tolist())


def test_logprobs_come_only_with_the_requests_that_ask() -> None:
    found = sample(random_logits(rows=3), request(), request(logprobs=0), request(logprobs=20))
    assert found[0].logprobs is None
    assert [len(token.logprobs.top_ids) for token in found[1:] if token.logprobs is not None] == [0, 20]


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1e-300},
        {"repetition_penalty": 1e-40, "top_k": 5},
        {"repetition_penalty": 1e6, "top_p": 0.5},
        {"temperature": 5e-324, "top_p": 0.5, "min_p": 1.0},
        {"logit_bias_ids": tuple(range(VOCAB_SIZE)), "logit_bias_values": (-100.0,) * VOCAB_SIZE},
    ],
    ids=str,
)
def test_extreme_parameters_still_sample_a_token_of_the_vocabulary(options: dict[str, Any]) -> None:
    for seed in range(10):
        token = sample(random_logits(seed), request(tuple(range(VOCAB_SIZE)), seed=seed, **options))[0]
        assert 0 <= token.token_id < VOCAB_SIZE
