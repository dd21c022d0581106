"""What lies in memory before a request, or was left there by another one, never reaches its tokens."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from baton.engine.build import build_engine
from baton.engine.runner.kv_memory import ByteArray
from baton.engine.settings import EngineSettings
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams
from tests.request_keys import key_of
from tests.system.conftest import Checkpoints
from tests.system.reference import Reference, make_prompt

NOT_A_NUMBER_BYTE = 0xFF


def test_a_pool_full_of_nan_changes_no_token(checkpoints: Checkpoints, references: Callable[[str], Reference]) -> None:
    pools: list[ByteArray] = []

    def allocate(num_bytes: int) -> ByteArray:
        pools.append(np.empty(num_bytes, dtype=np.uint8))
        return pools[0]

    settings = EngineSettings(model=str(checkpoints("llama")), num_threads=1, num_blocks=64, max_num_batched_tokens=24)
    core = build_engine(settings, allocate).core
    pools[0].fill(NOT_A_NUMBER_BYTE)
    prompts = [make_prompt(length, 50 + length) for length in (3, 16, 40, 75)]
    outputs: dict[RequestKey, list[int]] = {key_of(index): [] for index in range(len(prompts))}
    for index, prompt in enumerate(prompts):
        core.add(
            key_of(index),
            Prompt.of(prompt),
            DecodingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0),
        )
    while core.has_work:
        for output in core.step():
            if output.tokens:
                outputs[output.key].extend(output.token_ids)
                for token in output.tokens:
                    assert token.logprobs is not None
                    assert np.isfinite(token.logprobs.logprob)
    expected = [list(references("llama").greedy(prompt).token_ids) for prompt in prompts]
    assert list(outputs.values()) == expected
