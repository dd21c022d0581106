"""What engines on a device answer, compared: requests whose batch shrinks by one at a time, and where answers part.

A token that differs is wrong unless the model was undecided: kernels of other sizes round differently, and where two
tokens are equally likely rounding decides.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from baton.engine.build import Engine, build_engine
from baton.engine.core import EngineCore
from baton.engine.runner.kv_memory import allocate_private
from baton.engine.scheduler.step import SampledToken
from baton.engine.settings import EngineSettings
from baton.ranks.executor.choose import open_executor
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams
from tests.gpu.conftest import ENGINE_DEVICE

UNDECIDED = 0.1
"""Natural logarithm of the ratio of two probabilities below which rounding may decide, in bfloat16."""

Requests = Sequence[tuple[list[int], DecodingParams]]
Answers = Sequence[Sequence[SampledToken]]


def make_requests(count: int) -> Requests:
    """(prompt, parameters): each one token longer than the one before, so that the batch shrinks one by one."""
    chance = random.Random(0)
    prompts = [chance.choices(range(300), k=chance.randint(1, 90)) for _ in range(count)]
    return [
        (prompt, DecodingParams(temperature=0.0, max_tokens=3 + index, ignore_eos=True, logprobs=2))
        for index, prompt in enumerate(prompts)
    ]


def build(folder: Path, **settings: Any) -> Engine:
    """An engine for such requests."""
    common = {"device": ENGINE_DEVICE, "max_model_len": 512, "max_num_batched_tokens": 256, **settings}
    return build_engine(EngineSettings(model=str(folder), **common), allocate_private, open_executor=open_executor)


def generated(core: EngineCore, requests: Requests) -> Answers:
    """The tokens of each request, all of them together in one batch."""
    found: dict[RequestKey, list[SampledToken]] = {}
    for index, (prompt, params) in enumerate(requests):
        key = RequestKey.numbered(index)
        found[key] = []
        core.add(key, Prompt.of(prompt), params)
    while core.has_work:
        for output in core.step():
            if output.tokens:
                found[output.key] += output.tokens
    core.check()
    return list(found.values())


def lead(sampled: SampledToken, other: int) -> float:
    """How much likelier the sampled token was than `other`; infinite when that was not among the likeliest."""
    report = sampled.logprobs
    if report is None or other not in report.top_ids:
        return float("inf")
    return report.logprob - report.top_logprobs[report.top_ids.index(other)]


def leads(expected: Answers, found: Answers) -> list[float]:
    """Of each request whose tokens differ: how decided the first model was at the first that does."""
    parted = []
    for ours, theirs in zip(expected, found, strict=True):
        differing = (lead(a, b.token_id) for a, b in zip(ours, theirs, strict=True) if a.token_id != b.token_id)
        first = next(differing, None)
        if first is not None:
            parted.append(first)
    return parted


def require_same(within: Callable[..., None], expected: Answers, found: Answers, note: str) -> list[float]:
    """No token is wrong. Where the answers part all the same, see `leads`."""
    parted = leads(expected, found)
    wrong = [each for each in parted if each >= UNDECIDED]
    note += f"; {len(parted)} parted where two tokens were as likely"
    within(len(wrong), 0, unit=f"wrong of {len(expected)}", note=note, num_cases=len(expected))
    return parted
