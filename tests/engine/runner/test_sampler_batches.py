"""The sampler over whole batches: compared with a reference that goes row by row, and what it issues to the device."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from baton.device.base import Device
from baton.device.emulated import EmulatedDevice
from baton.device.host import HostDevice
from baton.engine.runner.sampled_rows import uniform_noise
from baton.engine.runner.sampler import Sampler
from baton.engine.runner.sampling_plan import sampling_bytes
from baton.engine.scheduler.request import PENDING_TOKEN, ScheduledRequest
from baton.engine.scheduler.step import SampledToken
from baton.wire.messages.output import TokenLogprobs
from baton.wire.sampling import DecodingParams
from tests.engine.runner.relay import scheduled
from tests.request_keys import A, key_of

VOCAB_SIZE = 50
EOS = 49


def choose_params(choose: random.Random) -> DecodingParams:
    """Each parameter off as often as on."""

    def maybe(value: Any, otherwise: Any) -> Any:
        return value if choose.random() < 0.4 else otherwise

    biased = choose.sample(range(VOCAB_SIZE), maybe(choose.randint(1, 5), 0))
    return DecodingParams(
        temperature=maybe(0.0, choose.choice([0.3, 1.0, 1.9])),
        top_k=maybe(choose.choice([1, 2, 7, 20, VOCAB_SIZE - 1, VOCAB_SIZE, 1000]), choose.choice([0, -1])),
        top_p=maybe(choose.choice([1e-9, 0.3, 0.8, 0.999]), 1.0),
        min_p=maybe(choose.choice([0.01, 0.3, 1.0]), 0.0),
        repetition_penalty=maybe(choose.choice([0.5, 1.7]), 1.0),
        presence_penalty=maybe(choose.choice([-1.5, 0.7]), 0.0),
        frequency_penalty=maybe(choose.choice([-0.4, 1.1]), 0.0),
        logit_bias_ids=tuple(biased),
        logit_bias_values=tuple(choose.uniform(-5, 5) for _ in biased),
        seed=choose.choice([None, 0, -(2**63), choose.randrange(2**40)]),
        choice=choose.choice([0, 3]),
        min_tokens=maybe(4, 0),
        stop_token_ids=tuple(choose.sample(range(VOCAB_SIZE), maybe(3, 0))),
        ignore_eos=choose.random() < 0.3,
        logprobs=maybe(choose.choice([0, 1, 20]), None),
        allowed_token_ids=tuple(choose.sample(range(VOCAB_SIZE), maybe(choose.choice([1, 5, 30]), 0))),
        bad_word_ids=maybe(((3,), (4, 5), (choose.randrange(VOCAB_SIZE), 6), (7,)), ()),
    )


def choose_request(choose: random.Random) -> ScheduledRequest:
    prompt, output = choose.randint(1, 6), choose.randint(0, 7)
    token_ids = [choose.randrange(VOCAB_SIZE) for _ in range(prompt + output)]
    key = key_of(str(choose.random()))
    return scheduled(key, len(token_ids) - 1, 1, token_ids, prompt, [0], choose_params(choose))


def choose_logits(choose: random.Random, num_rows: int) -> Tensor:
    """Some rows with many equal logits, some not a number."""
    logits = torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(choose.randrange(2**30))) * 2
    for row in range(num_rows):
        kind = choose.random()
        if kind < 0.3:
            logits[row] = logits[row].round()
        elif kind < 0.4:
            logits[row, choose.randrange(VOCAB_SIZE)] = torch.nan
    return logits


def reference(logits: npt.NDArray[np.float32], request: ScheduledRequest) -> SampledToken | None:
    """One row [V], one rule after another, in numpy."""
    params, position = request.params, len(request.token_ids) - request.prompt.num_tokens
    row = logits.copy()
    one = np.float32
    for token_id, bias in zip(params.logit_bias_ids, params.logit_bias_values, strict=True):
        row[token_id] += one(bias)
    if params.repetition_penalty != 1.0:
        for token_id in set(request.token_ids):
            penalty = one(params.repetition_penalty)
            row[token_id] = row[token_id] / penalty if row[token_id] > 0 else row[token_id] * penalty
    for token_id, count in Counter(request.token_ids[request.prompt.num_tokens :]).items():
        row[token_id] += one(-params.presence_penalty - params.frequency_penalty * count)
    if position < params.min_tokens:
        row[[*params.stop_token_ids, *([] if params.ignore_eos else [EOS])]] = np.finfo(one).min
    output = request.token_ids[request.prompt.num_tokens :]
    for *before, last in params.bad_word_ids:
        if not before or list(output)[-len(before) :] == before:
            row[last] = np.finfo(one).min
    if params.allowed_token_ids:
        row[[token_id for token_id in range(VOCAB_SIZE) if token_id not in params.allowed_token_ids]] = -np.inf
    if np.isnan(logits).any():
        return None
    token_id = int(row.argmax()) if params.temperature == 0.0 else reference_draw(row, params, position)
    return SampledToken(token_id, reference_logprobs(logits, token_id, params.logprobs))


def reference_draw(row: npt.NDArray[np.float32], params: DecodingParams, position: int) -> int:
    is_ordered = 0 < params.top_k < VOCAB_SIZE or params.top_p < 1.0
    order = np.argsort(-row, kind="stable") if is_ordered else np.arange(VOCAB_SIZE)
    if 0 < params.top_k < VOCAB_SIZE:
        order = order[: params.top_k]
    scaled = (row[order].astype(np.float64) - np.float64(row.max())) / params.temperature
    weights = np.exp(scaled)
    weights /= weights.sum()
    if params.top_p < 1.0:
        mass_before = np.concatenate([[0.0], np.cumsum(weights)[:-1]])
        weights[mass_before >= params.top_p] = 0.0
    weights[weights < params.min_p * weights.max()] = 0.0
    threshold = uniform_noise(params.seed or 0, params.choice, position) * np.cumsum(weights)[-1]
    return int(order[np.flatnonzero(np.cumsum(weights) > threshold)[0]])


def reference_logprobs(logits: npt.NDArray[np.float32], token_id: int, num_top: int | None) -> TokenLogprobs | None:
    if num_top is None:
        return None
    shifted = logits.astype(np.float64) - logits.max()
    logprobs = shifted - np.log(np.exp(shifted).sum())
    best = np.argsort(-logprobs, kind="stable")[:num_top]
    return TokenLogprobs(float(logprobs[token_id]), tuple(best.tolist()), tuple(logprobs[best].tolist()))


def sample_rows(logits: Tensor, requests: Sequence[ScheduledRequest], device: Device) -> list[SampledToken | None]:
    sampler = Sampler(frozenset({EOS}), VOCAB_SIZE)
    staging = device.staging(sampling_bytes(len(requests)))
    staging.begin()
    plan = sampler.plan(requests, staging).stage_changes(staging)
    staging.upload()
    return plan.tokens(device.fetch(sampler.sample(plan, logits.clone())).wait())


def assert_same(found: SampledToken | None, expected: SampledToken | None, logits: Tensor) -> None:
    assert (found is None) == (expected is None)
    if found is None or expected is None:
        return
    assert found.token_id == expected.token_id
    assert (found.logprobs is None) == (expected.logprobs is None)
    if found.logprobs is not None and expected.logprobs is not None:
        assert found.logprobs.logprob == pytest.approx(expected.logprobs.logprob, abs=1e-4)
        assert found.logprobs.top_logprobs == pytest.approx(expected.logprobs.top_logprobs, abs=1e-4)
        # which of equal ones are named is open
        assert len(set(found.logprobs.top_ids)) == len(expected.logprobs.top_ids)
        named, rightly = (logits[list(ids)].tolist() for ids in (found.logprobs.top_ids, expected.logprobs.top_ids))
        assert named == rightly


@pytest.mark.parametrize("make_device", [HostDevice, EmulatedDevice])
@pytest.mark.parametrize(("pass_elements", "narrow_width"), [(1 << 16, 1024), (3 * VOCAB_SIZE, 8), (1, 0)])
def test_a_batch_samples_what_each_row_samples_by_itself(
    make_device: Callable[[], Device], pass_elements: int, narrow_width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = make_device()
    monkeypatch.setattr("baton.engine.runner.sampler._HOST_PASS_ELEMENTS", pass_elements)
    for module in ("sampler", "sampling_plan"):
        monkeypatch.setattr(f"baton.engine.runner.{module}.NARROW_WIDTH", narrow_width)
    choose = random.Random(pass_elements)
    num_valid = 0
    for _ in range(25):
        num_rows = choose.randint(1, 20)
        logits, requests = choose_logits(choose, num_rows), [choose_request(choose) for _ in range(num_rows)]
        found = sample_rows(logits, requests, device)
        for row in range(num_rows):
            assert_same(found[row], reference(logits[row].numpy(), requests[row]), logits[row])
            assert sample_rows(logits[row : row + 1], requests[row : row + 1], device) == [found[row]]
            num_valid += found[row] is not None
    assert num_valid > 120


def test_equal_logits_stand_in_the_order_of_their_ids() -> None:
    """Whatever the neighbours ask for: two of six equal tokens are kept, and they are the first two."""
    for neighbour in ({"top_k": 5}, {"top_k": 2}, {"top_p": 0.5}, {}):
        for width in range(1, VOCAB_SIZE, 7):
            logits = torch.zeros(40, VOCAB_SIZE)
            logits[:, width : width + 6] = 1.0
            params = [DecodingParams(top_k=2, seed=seed) for seed in range(39)]
            requests = [scheduled(key_of(row), 0, 1, [1], 1, [0], one) for row, one in enumerate(params)]
            requests.append(scheduled(key_of(39), 0, 1, [1], 1, [0], DecodingParams(seed=1, **neighbour)))
            token_ids = {
                token.token_id for token in sample_rows(logits, requests, HostDevice())[:39] if token is not None
            }
            assert token_ids == {width, width + 1}


def test_minus_zero_equals_zero() -> None:
    logits = torch.full((30, VOCAB_SIZE), -50.0)
    logits[:, 4], logits[:, 7] = -0.0, 0.0
    requests = [scheduled(key_of(seed), 0, 1, [1], 1, [0], DecodingParams(top_k=1, seed=seed)) for seed in range(30)]
    assert {token.token_id for token in sample_rows(logits, requests, HostDevice()) if token is not None} == {4}


def test_sampling_asks_the_device_for_nothing_and_repeats() -> None:
    """Recorded, and replayed over other logits."""
    choose = random.Random(4)
    requests = [choose_request(choose) for _ in range(30)]
    sampler, device = Sampler(frozenset({EOS}), VOCAB_SIZE), EmulatedDevice()
    staging = device.staging(sampling_bytes(30))
    staging.begin()
    plan = sampler.plan(requests, staging).stage_changes(staging)
    staging.upload()
    assert plan.groups
    assert plan.changes is not None
    assert None not in (plan.changes.bias, plan.changes.repetition, plan.changes.presence, plan.changes.withheld)
    assert plan.reported_rows is not None
    logits = choose_logits(choose, 30)
    graph, outputs = device.record(lambda: sampler.sample(plan, logits))
    others = choose_logits(choose, 30)
    logits.copy_(others)
    graph.replay()
    assert plan.tokens(device.fetch(outputs).wait()) == sample_rows(others, requests, HostDevice())


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Names the operations that are issued."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def operations(params: Sequence[DecodingParams]) -> list[str]:
    """What is issued for a batch of rows with these parameters."""
    sampler = Sampler(frozenset({EOS}), VOCAB_SIZE)
    requests = [scheduled(key_of(row), 2, 1, [1, 2, 3], 1, [0], item) for row, item in enumerate(params)]
    logits = torch.randn(len(params), VOCAB_SIZE)
    plan = sampler.plan(requests, HostDevice().staging(0))
    with Counting() as counting:
        sampler.sample(plan, logits)
    return [name for name in counting.names if name not in ("view", "unsqueeze", "slice", "unbind", "select")]


def test_greedy_rows_cost_two_operations_and_no_staging() -> None:
    greedy = DecodingParams(temperature=0.0)
    assert operations([greedy] * 9) == ["max", "gt"]
    device = EmulatedDevice()
    staging = device.staging(0)
    staging.begin()
    plan = Sampler(frozenset({EOS}), VOCAB_SIZE).plan([scheduled(A, 0, 1, [1], 1, [0], greedy)], staging)
    assert plan.stage_changes(staging) is plan


@pytest.mark.parametrize(
    "params",
    [
        DecodingParams(seed=1),
        DecodingParams(seed=1, top_k=5, top_p=0.9, min_p=0.1),
        DecodingParams(temperature=0.0, repetition_penalty=1.2, presence_penalty=1.0),
        DecodingParams(temperature=0.0, logit_bias_ids=(1, 4), logit_bias_values=(1.0, 2.0), min_tokens=9),
    ],
    ids=str,
)
def test_operations_do_not_grow_with_the_batch(params: DecodingParams) -> None:
    assert operations([params] * 12) == operations([params] * 2)


def test_rows_without_truncation_are_not_sorted() -> None:
    sorting = {"sort", "topk"}
    assert not sorting & set(operations([DecodingParams(seed=1, min_p=0.1), DecodingParams(temperature=0.0)]))
    assert sorting & set(operations([DecodingParams(seed=1), DecodingParams(seed=1, top_k=3)])) == {"topk"}


@pytest.mark.parametrize("num_bytes", [0, 200, 1000])
def test_changes_that_do_not_fit_the_staging_are_made_too(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    choose = random.Random(num_bytes)
    logits, requests = choose_logits(choose, 25), [choose_request(choose) for _ in range(25)]
    expected = sample_rows(logits, requests, HostDevice())
    monkeypatch.setattr("baton.engine.runner.sampling_plan.CHANGE_BYTES", num_bytes)
    assert sample_rows(logits, requests, EmulatedDevice()) == expected


def test_a_penalty_needs_every_token() -> None:
    params = DecodingParams(temperature=0.0, frequency_penalty=0.1)
    request = scheduled(A, 2, 1, [1, 2, PENDING_TOKEN], 2, [0], params)
    with pytest.raises(ValueError, match=r"-a'.* has a penalty"):
        sample_rows(torch.zeros(1, VOCAB_SIZE), [request], HostDevice())


def test_a_pending_token_counts_as_output() -> None:
    """Position and minimum length are those of the token after it."""
    known = scheduled(A, 2, 1, [1, 2, 3], 1, [0], DecodingParams(seed=7, min_tokens=2))
    for num_known in (1, 2):
        logits = torch.zeros(1, VOCAB_SIZE)
        logits[0, EOS] = 50.0
        tokens = known.token_ids[:num_known]
        last = known._replace(start=num_known, token_ids=[*tokens, 3])
        pending = last._replace(token_ids=[*tokens, PENDING_TOKEN])
        assert sample_rows(logits, [pending], HostDevice()) == sample_rows(logits, [last], HostDevice())
