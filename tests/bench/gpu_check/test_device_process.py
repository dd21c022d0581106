from __future__ import annotations

import math

import pytest
import torch

from bench.gpu_check import device_process
from bench.gpu_check.device_process import checksums_wrong, parameter_mixes, sample, sampler_differences
from device.host import HostDevice
from engine.scheduler.request import SampledToken
from wire.messages import TokenLogprobs
from wire.sampling import DecodingParams

CPU = torch.device("cpu")


@pytest.mark.parametrize("block_bytes", [64, 4096, 100_002])
def test_a_pool_in_a_tensor_has_the_checksums_of_one_in_an_array(block_bytes: int) -> None:
    assert checksums_wrong(block_bytes, 5, CPU) == 0


def test_a_checksum_that_differs_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    right = device_process.device_pool

    def damaged(blocks: torch.Tensor) -> object:
        blocks[2, 17] ^= 1
        return right(blocks)

    monkeypatch.setattr(device_process, "device_pool", damaged)
    assert checksums_wrong(4096, 5, CPU) == 1


def test_checksums_that_are_all_alike_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_process, "_taken", lambda computer, ids: [7] * len(ids))
    assert checksums_wrong(64, 5, CPU) == 4


def test_the_mixes_use_every_parameter() -> None:
    used = [request.params for request in parameter_mixes(20, 1000)]
    default = DecodingParams()
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "logprobs"):
        assert any(getattr(params, name) != getattr(default, name) for params in used), name
    for name in ("frequency_penalty", "logit_bias_ids", "min_tokens", "stop_token_ids"):
        assert any(getattr(params, name) != getattr(default, name) for params in used), name
    assert any(params.temperature == 0.0 for params in used)
    assert len({params.seed for params in used}) == len(used)


def test_other_logits_give_other_tokens_and_nan_gives_none() -> None:
    requests = parameter_mixes(20, 300)
    logits = torch.randn(20, 300, generator=torch.Generator().manual_seed(1)) * 3
    found = sample(requests, logits, HostDevice())
    assert sampler_differences(found, sample(requests, logits, HostDevice())) == (0, 0.0)
    num_wrong, _ = sampler_differences(found, sample(requests, logits.flip(1), HostDevice()))
    assert num_wrong > 10
    logits[3, 4] = math.nan
    assert sample(requests, logits, HostDevice())[3] is None


def token(token_id: int, logprob: float | None = None, *top: float) -> SampledToken:
    report = None if logprob is None else TokenLogprobs(logprob, tuple(range(len(top))), top)
    return SampledToken(token_id, report)


@pytest.mark.parametrize(
    ("mine", "theirs", "num_wrong", "difference"),
    [
        (token(1), token(1), 0, 0.0),
        (token(1), token(2), 1, 0.0),
        (None, token(1), 1, 0.0),
        (None, None, 0, 0.0),
        (token(1, -1.0), token(1), 1, 0.0),
        (token(1, -1.0, -1.0, -2.0), token(1, -1.5, -1.0, -4.0), 0, 2.0),
        (token(1, -1.0, -1.0, -2.0), token(1, -1.0, -1.0), 1, 0.0),
    ],
)
def test_differences_of_two_samplers(
    mine: SampledToken | None, theirs: SampledToken | None, num_wrong: int, difference: float
) -> None:
    assert sampler_differences([mine], [theirs]) == (num_wrong, difference)


def test_a_logprob_that_is_no_number_is_the_worst() -> None:
    _, difference = sampler_differences([token(1, math.nan), token(2, -1.0)], [token(1, -1.0), token(2, -2.0)])
    assert math.isnan(difference)
