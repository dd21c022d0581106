"""Checksums and the sampler on a GPU against those of the host."""

from __future__ import annotations

import pytest
import torch

from bench.gpu_check.device_process import (
    LOGPROB_BOUND,
    checksums_wrong,
    parameter_mixes,
    sample,
    sampler_differences,
)
from device.base import Device
from device.host import HostDevice

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)


@pytest.mark.parametrize("block_bytes", [64, 4096, 100_002, 229_376, 9 * 2**18])
def test_checksums_are_those_of_the_host(block_bytes: int, device: Device) -> None:
    assert checksums_wrong(block_bytes, 300 if block_bytes < 10_000 else 9, device.torch_device, seed=3) == 0


@pytest.mark.parametrize("vocab_size", [300, 32_000, 151_936])
def test_the_sampler_draws_what_it_draws_on_the_host(vocab_size: int, device: Device) -> None:
    requests = parameter_mixes(100, vocab_size, seed=5)
    logits = torch.randn(100, vocab_size, generator=torch.Generator().manual_seed(5)) * 3
    num_wrong, difference = sampler_differences(
        sample(requests, logits, device), sample(requests, logits, HostDevice())
    )
    assert num_wrong == 0
    assert difference <= LOGPROB_BOUND


def test_staging_is_reused_while_the_device_is_behind(device: Device) -> None:
    # the host must not overwrite what an upload still reads: a second step is staged behind much work
    requests = parameter_mixes(40, 32_000, seed=6)
    logits = torch.randn(40, 32_000, generator=torch.Generator().manual_seed(6)) * 3
    busy = torch.randn(4096, 4096, device=device.torch_device)
    expected = sample(requests, logits, HostDevice())
    for _ in range(5):
        for _ in range(20):
            busy = torch.nn.functional.normalize(busy @ busy)
        assert sampler_differences(sample(requests, logits, device), expected)[0] == 0
