"""Checksums and the sampler on a device against those of the host."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from baton.device.base import Device
from baton.device.host import HostDevice
from baton.engine.runner.redraws import redraw_beforehand
from baton.engine.runner.sampler import Sampler
from baton.engine.runner.sampling_plan import sampling_bytes
from baton.engine.scheduler.request import MaskSource
from baton.engine.scheduler.step import SampledToken
from baton.kvtransfer.integrity import DOT64
from baton.kvtransfer.parts import part_runs
from baton.kvtransfer.pools.base import Checksums
from baton.kvtransfer.pools.cut import StrandTotals, sink_of, source_of
from baton.kvtransfer.pools.device import DevicePool
from baton.kvtransfer.pools.host import HostPool
from baton.kvtransfer.pools.open import open_pool
from baton.wire.kv_shard import KvDivision, own_layout
from baton.wire.layout import KvLayout, LayerKv
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams
from tests.gpu.conftest import IS_GPU

LOGPROB_BOUND = 1e-4
EOS_IDS = frozenset({3, 5})
NUM_MIXES = 100 if IS_GPU else 20


@dataclass(frozen=True, slots=True)
class Mix:
    """See `SampledRequest`."""

    key: RequestKey
    token_ids: Sequence[int]
    prompt: Prompt
    params: DecodingParams
    matcher: MaskSource | None = None
    takes_largest: bool = False


class RandomMask:
    """A grammar that allows half of the vocabulary."""

    def __init__(self, vocab_size: int, chance: random.Random) -> None:
        self._mask = chance.randbytes(-(-vocab_size // 8))

    def accepts(self, token_id: int) -> bool:
        return bool(self._mask[token_id >> 3] >> (token_id & 7) & 1)

    def mask(self) -> bytes | None:
        return self._mask

    def fail(self, reason: str) -> None:
        raise AssertionError(reason)


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
        prompt = Prompt.of(token_ids[: chance.randint(1, len(token_ids))])
        matcher = RandomMask(vocab_size, chance) if index % 3 == 0 else None
        made.append(Mix(RequestKey.numbered(index), token_ids, prompt, params, matcher))
    return made


@torch.inference_mode()
def sample(requests: Sequence[Mix], logits: Tensor, device: Device) -> list[SampledToken | None]:
    """What the sampler samples on a device; `logits` [N, V] float32 on the host."""
    sampler = Sampler(EOS_IDS, logits.shape[1])
    staging = device.staging(sampling_bytes(len(requests)))
    staging.begin()
    plan = sampler.plan(requests, staging).stage_changes(staging)
    staging.upload()
    redraw = redraw_beforehand(plan.grammar_rows, sampler.vocab_size, staging) if device.is_asynchronous else None
    staging.upload()
    outputs = sampler.sample(plan, logits.to(device.torch_device, copy=True), redraw)
    return plan.tokens(device.fetch(outputs).wait())


def computed(computer: Checksums, block_ids: Sequence[int]) -> list[int]:
    """Checksums of these blocks, as many at once as the pool likes."""
    values: list[int] = []
    step = max(1, min(computer.max_blocks, len(block_ids)))
    for first in range(0, len(block_ids), step):
        pending = computer.begin(block_ids[first : first + step])
        while (taken := pending.take()) is None:
            continue
        values += taken
    return values


def logprobs_of(token: SampledToken | None) -> list[float]:
    """Those that were asked for, the sampled token's first."""
    if token is None or token.logprobs is None:
        return []
    return [token.logprobs.logprob, *token.logprobs.top_logprobs]


def token_ids(tokens: Sequence[SampledToken | None]) -> list[int | None]:
    return [None if token is None else token.token_id for token in tokens]


def random_logits(num_rows: int, vocab_size: int) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 3


@pytest.mark.parametrize("block_bytes", [64, 4096, 100_002, 229_376, 9 * 2**18])
def test_checksums_are_those_of_the_host(block_bytes: int, device: Device) -> None:
    num_blocks = 300 if block_bytes < 10_000 else 9
    chance = np.random.default_rng(3)
    blocks = chance.integers(0, 256, (num_blocks, block_bytes), dtype=np.uint8)
    ids = chance.permutation(num_blocks).tolist()
    found = computed(DevicePool(torch.from_numpy(blocks.copy()).to(device.torch_device)).checksums(DOT64), ids)
    assert found == computed(HostPool(blocks).checksums(DOT64), ids)
    assert len(set(found)) == num_blocks


@pytest.mark.parametrize("vocab_size", [300, 32_000, 151_936] if IS_GPU else [1000])
def test_the_sampler_draws_what_it_draws_on_the_host(
    vocab_size: int, device: Device, within: Callable[..., None]
) -> None:
    requests, logits = parameter_mixes(NUM_MIXES, vocab_size, seed=5), random_logits(NUM_MIXES, vocab_size)
    logits[-1, 17] = torch.nan
    found, wanted = sample(requests, logits, device), sample(requests, logits, HostDevice())
    assert token_ids(found) == token_ids(wanted)
    assert found[-1] is None, "a token was drawn from a row of NaN"
    ours, theirs = ([number for token in tokens for number in logprobs_of(token)] for tokens in (found, wanted))
    differences = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    assert differences, "some ask for logprobs"
    within(float(np.max(differences)), LOGPROB_BOUND, note="logprobs", num_cases=NUM_MIXES)


def test_staging_is_reused_while_the_device_is_behind(device: Device) -> None:
    # the host must not overwrite what an upload still reads: a second step is staged behind much work
    vocab_size = 32_000 if IS_GPU else 1000
    requests, logits = parameter_mixes(40, vocab_size, seed=6), random_logits(40, vocab_size)
    size = 4096 if IS_GPU else 64
    busy = torch.randn(size, size, device=device.torch_device)
    expected = token_ids(sample(requests, logits, HostDevice()))
    for _ in range(5):
        for _ in range(20):
            busy = torch.nn.functional.normalize(busy @ busy)
        assert token_ids(sample(requests, logits, device)) == expected


def test_ranks_exchange_parts_of_blocks_and_add_them_up_as_on_the_host(
    device: Device, within: Callable[..., None]
) -> None:
    """From two ranks to each of four, of an 8B model's blocks, through host memory as over shm and zmq."""
    layout = KvLayout.of_layers("bfloat16", 16, [LayerKv(8, 128)] * (36 if IS_GPU else 3))
    sources, (_, target, *_) = KvDivision(2), KvDivision(4).shards
    ((source, runs),) = part_runs(layout, sources, target).items()
    chance = np.random.default_rng(3)
    blocks = chance.integers(0, 256, (8, own_layout(layout, source).block_bytes), dtype=np.uint8)
    empty = np.zeros((8, own_layout(layout, target).block_bytes), dtype=np.uint8)
    found: list[tuple[object, object]] = []
    for place in (device.torch_device, None):
        pools = [
            open_pool(each if place is None else torch.from_numpy(each.copy()).to(place)) for each in (blocks, empty)
        ]
        payload = np.empty((3, sum(run.num_bytes for run in runs)), dtype=np.uint8)
        source_of(pools[0], runs).read([6, 1, 4], payload)
        sink = sink_of(pools[1], runs)
        sink.write([2, 7, 0], payload)
        sink.settle()
        pending = StrandTotals(pools[1], layout, target).begin([2, 7, 0, 1])
        while (totals := pending.take()) is None:
            pass
        whole = np.empty_like(empty)
        pools[1].read(range(8), whole)
        found.append((whole.tobytes(), [total % 2**64 for total in totals]))
    within(sum(mine != theirs for mine, theirs in zip(*found, strict=True)), 0, unit="differ", num_cases=2)
