"""Checks of what runs on the device beside the model: checksums of blocks, and the sampler.

Owns the blocks and the mixes of parameters. Both have a version for the host that says what is right.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.gpu_check.floors import gb_per_s
from bench.gpu_check.parts_process import Setup
from bench.gpu_check.rows import Row, count_row, error_row, rate_row, worst_of
from bench.gpu_check.shapes import block_bytes
from bench.gpu_check.timing_process import Stopwatch, read_gb_per_s
from device.base import Device
from engine.runner.sampler import Sampler
from engine.runner.sampling_plan import sampling_bytes
from engine.scheduler.request import SampledToken
from kvtransfer.integrity import DOT64
from kvtransfer.pools.base import Checksums, KvPool
from kvtransfer.pools.device import DevicePool
from kvtransfer.pools.host import HostPool
from wire.request_key import RequestKey
from wire.sampling import DecodingParams

_BLOCK_BYTES = (64, 4096, 229_376, 2**20 + 4)
_NUM_BLOCKS = 9
_EOS_IDS = frozenset({3, 5})
LOGPROB_BOUND = 1e-4


@dataclass(frozen=True, slots=True)
class Mix:
    """See `SampledRequest`."""

    key: RequestKey
    token_ids: Sequence[int]
    num_prompt_tokens: int
    params: DecodingParams


def device_pool(blocks: Tensor) -> KvPool:
    """The pool of transfers over blocks [num_blocks, block_bytes] of a device."""
    return DevicePool(blocks)


def checksums_wrong(block_bytes: int, num_blocks: int, device: torch.device, seed: int = 0) -> int:
    """Of so many random blocks, those whose checksum the device computes differently than the host, or that two blocks
    share.
    """
    chance = np.random.default_rng(seed)
    blocks = chance.integers(0, 256, (num_blocks, block_bytes), dtype=np.uint8)
    ids = chance.permutation(num_blocks).tolist()
    wanted = _taken(HostPool(blocks).checksums(DOT64), ids)
    found = _taken(device_pool(torch.from_numpy(blocks.copy()).to(device)).checksums(DOT64), ids)
    num_shared = num_blocks - len(set(found))
    return sum(mine != theirs for mine, theirs in zip(found, wanted, strict=True)) + num_shared


def _taken(computer: Checksums, block_ids: Sequence[int]) -> list[int]:
    """Checksums of these blocks, as many at once as the pool likes."""
    values: list[int] = []
    step = max(1, min(computer.max_blocks, len(block_ids)))
    for first in range(0, len(block_ids), step):
        pending = computer.begin(block_ids[first : first + step])
        while (taken := pending.take()) is None:
            continue
        values += taken
    return values


def parameter_mixes(count: int, vocab_size: int, seed: int = 0) -> list[Mix]:
    """Requests that ask for every kind of sampling, alone and together."""
    chance = random.Random(seed)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "logprobs": 5},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 40},
        {"temperature": 1.3, "top_p": 0.9},
        {"temperature": 0.9, "min_p": 0.05},
        {"temperature": 1.1, "top_k": 2000, "top_p": 0.95, "min_p": 0.01, "logprobs": 0},
        {"temperature": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": -0.3},
        {"temperature": 0.0, "min_tokens": 100, "stop_token_ids": (7, 11)},
        {"temperature": 1.0, "logit_bias_ids": (1, 2, 9), "logit_bias_values": (5.0, -100.0, 3.5), "logprobs": 20},
    ]
    made = []
    for index in range(count):
        token_ids = chance.choices(range(vocab_size), k=chance.randint(2, 60))
        params = DecodingParams(**kinds[index % len(kinds)], seed=chance.randrange(2**62))
        num_prompt = chance.randint(1, len(token_ids))
        made.append(Mix(RequestKey.numbered(index), token_ids, num_prompt, params))
    return made


@torch.inference_mode()
def sample(requests: Sequence[Mix], logits: Tensor, device: Device) -> list[SampledToken | None]:
    """What the sampler draws on a device; `logits` [N, V] float32 on the host."""
    sampler = Sampler(_EOS_IDS, logits.shape[1])
    staging = device.staging(sampling_bytes(len(requests)))
    staging.begin()
    plan = sampler.plan(requests, staging).stage_changes(staging)
    staging.upload()
    outputs = sampler.sample(plan, logits.to(device.torch_device, copy=True))
    return plan.tokens(device.fetch(outputs).wait())


def sampler_differences(
    found: Sequence[SampledToken | None], wanted: Sequence[SampledToken | None]
) -> tuple[int, float]:
    """(tokens that differ, largest difference of a logprob)."""
    num_wrong, differences = 0, [0.0]
    for mine, theirs in zip(found, wanted, strict=True):
        if mine is None or theirs is None or mine.token_id != theirs.token_id:
            num_wrong += mine is not theirs
            continue
        if (mine.logprobs is None) != (theirs.logprobs is None):
            num_wrong += 1
        elif mine.logprobs is not None and theirs.logprobs is not None:
            ours = (mine.logprobs.logprob, *mine.logprobs.top_logprobs)
            others = (theirs.logprobs.logprob, *theirs.logprobs.top_logprobs)
            num_wrong += len(ours) != len(others)
            differences += [abs(a - b) for a, b in zip(ours, others, strict=False)]
    return num_wrong, worst_of(differences)


class DeviceBench:
    """See `Bench`."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._device = setup.open()

    def check(self, name: str) -> list[Row]:
        """See `Bench.check`."""
        return self._checksum() if name == "checksum" else self._sampler()

    def close(self) -> None:
        """See `Bench.close`."""
        self._device.close()

    def _checksum(self) -> list[Row]:
        rows = []
        place = self._device.torch_device
        for num_bytes in _BLOCK_BYTES:
            wrong = checksums_wrong(num_bytes, _NUM_BLOCKS, place)
            rows.append(count_row("dot64, device against host", f"blocks of {num_bytes} bytes", wrong, _NUM_BLOCKS))
        size = block_bytes(self._setup.model("8B"), 16)
        count = 512 if self._setup.is_gpu else 16
        watch = Stopwatch(place, quick=self._setup.is_quick)
        pool = device_pool(torch.randint(0, 256, (count, size), dtype=torch.uint8, device=place))
        computer, ids = pool.checksums(DOT64), list(range(count))
        taken_ms = watch.median_ms(lambda: _taken(computer, ids))
        rate, ceiling = gb_per_s(count * size, taken_ms), read_gb_per_s(place, watch)
        case = f"{count} blocks of {size / 2**20:.3g} MiB"
        rows.append(rate_row("dot64 on the device", case, rate, "GB/s", ceiling, note=f"{taken_ms:.3g} ms"))
        return rows

    def _sampler(self) -> list[Row]:
        if not self._setup.is_gpu:
            # the same sampler twice: that the check works, not that a device is right
            other: Device = self._device
        else:
            other = Setup("cpu", self._setup.is_quick).open()
        rows = []
        for vocab_size in (1000, 151_936) if self._setup.is_gpu else (1000,):
            requests = parameter_mixes(60 if self._setup.is_gpu else 20, vocab_size)
            chance = torch.Generator().manual_seed(vocab_size)
            logits = torch.randn(len(requests), vocab_size, generator=chance) * 3.0
            logits[-1, 17] = math.nan
            found = sample(requests, logits, self._device)
            num_wrong, difference = sampler_differences(found, sample(requests, logits, other))
            case = f"{len(requests)} mixes of parameters, vocabulary {vocab_size}"
            rows.append(count_row("sampler, device against host", case, num_wrong, len(requests)))
            rows.append(error_row("sampler, logprobs", case, difference, LOGPROB_BOUND))
            if found[-1] is not None:
                rows.append(count_row("sampler, a row of NaN", case, 1, 1, note="a token was drawn from it"))
        return rows


def open_bench(setup: Setup) -> DeviceBench:
    """See `bench.gpu_check.worker_process`."""
    return DeviceBench(setup)
