"""Recorded decode steps against eager ones, on a device.

A batch shrinks by one request at a time from its largest size to one, so every bucket of recorded steps is replayed,
with and without padding. A token that differs is wrong unless the eager model was undecided: kernels of other sizes
round differently, and where two tokens are equally likely rounding decides.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from device.base import Device
from engine.build import build_engine
from engine.core import EngineCore
from engine.runner.kv_memory import allocate_private
from engine.scheduler.request import SampledToken
from engine.settings import EngineSettings
from tests.checkpoints import make_checkpoint
from tests.gpu.conftest import ENGINE_DEVICE, IS_GPU, IS_QUICK
from wire.request_key import RequestKey
from wire.sampling import DecodingParams

UNDECIDED = 0.1
"""Natural logarithm of the ratio of two probabilities below which rounding may decide, in bfloat16."""
MAX_SEQS = 40 if IS_GPU else 12

Requests = Sequence[tuple[list[int], DecodingParams]]


def make_requests(count: int) -> Requests:
    """(prompt, parameters): each one token longer than the one before, so that the batch shrinks one by one."""
    chance = random.Random(0)
    prompts = [chance.choices(range(300), k=chance.randint(1, 90)) for _ in range(count)]
    return [
        (prompt, DecodingParams(temperature=0.0, max_tokens=3 + index, ignore_eos=True, logprobs=2))
        for index, prompt in enumerate(prompts)
    ]


def generate(folder: Path, dtype: str, requests: Requests, *, enforce_eager: bool) -> list[list[SampledToken]]:
    """The tokens of each request, all of them together in one batch."""
    settings = EngineSettings(
        model=str(folder),
        device=ENGINE_DEVICE,
        num_threads=0 if IS_GPU else 1,
        dtype=dtype,
        num_blocks=1024,
        max_model_len=512,
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=256,
        enforce_eager=enforce_eager,
    )
    return generated(build_engine(settings, allocate_private).core, requests)


def generated(core: EngineCore, requests: Requests) -> list[list[SampledToken]]:
    """The same of an engine that is there."""
    found: dict[RequestKey, list[SampledToken]] = {}
    for index, (prompt, params) in enumerate(requests):
        key = RequestKey.numbered(index)
        found[key] = []
        core.add(key, prompt, params)
    while core.has_work:
        for output in core.step():
            if output.token is not None:
                found[output.key].append(output.token)
    core.check()
    return list(found.values())


def lead(sampled: SampledToken, other: int) -> float:
    """How much likelier the sampled token was than `other`; infinite when that was not among the likeliest."""
    report = sampled.logprobs
    if report is None or other not in report.top_ids:
        return float("inf")
    return report.logprob - report.top_logprobs[report.top_ids.index(other)]


def leads(eager: Sequence[Sequence[SampledToken]], recorded: Sequence[Sequence[SampledToken]]) -> list[float]:
    """Of each request whose tokens differ: how decided the eager model was at the first that does."""
    found = []
    for ours, theirs in zip(eager, recorded, strict=True):
        differing = (lead(a, b.token_id) for a, b in zip(ours, theirs, strict=True) if a.token_id != b.token_id)
        first = next(differing, None)
        if first is not None:
            found.append(first)
    return found


@pytest.mark.parametrize("dtype", ["bfloat16"] if IS_QUICK else ["bfloat16", "float32"])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_recorded_steps_draw_the_tokens_of_eager_ones(
    family: str, dtype: str, device: Device, tmp_path: Path, within: Callable[..., None]
) -> None:
    folder = make_checkpoint(tmp_path / family, family, changes={"head_dim": 64})
    requests = make_requests(MAX_SEQS)
    eager, recorded = (
        generate(folder, dtype, requests, enforce_eager=enforce_eager) for enforce_eager in (True, False)
    )
    found = leads(eager, recorded)
    wrong = [each for each in found if each >= UNDECIDED]
    assert len(found) - len(wrong) <= len(requests) // 4, "too many parted where two tokens were as likely"
    note = f"batches of {len(requests)} down to 1; {len(found)} parted where two tokens were as likely"
    within(len(wrong), 0, unit=f"wrong of {len(requests)}", note=note, num_cases=len(requests))
