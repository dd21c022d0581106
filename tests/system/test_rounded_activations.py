"""A prompt that one node computes and another goes on with, both with activations rounded to 8 bits: the tokens of one
engine alone, whose rows do not depend on what is computed with them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from baton import LLM, SamplingParams
from tests.engine.native.compiled import needs_kernels
from tests.system.conftest import Checkpoints
from tests.system.harness import BLOCK_SIZE
from tests.system.reference import make_prompt
from tests.system.test_transports import ask, relaying

pytestmark = needs_kernels
_LENGTHS, _NUM_TOKENS = (3, 2 * BLOCK_SIZE + 1, 5 * BLOCK_SIZE + 10), 16


def test_two_nodes_answer_as_one_engine(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = checkpoints("qwen3")
    prompts = [make_prompt(length, 7) for length in _LENGTHS]
    alone = LLM(str(folder), quantization="int4", activation_dtype="int8", num_threads=1, num_blocks=64)
    params = SamplingParams(temperature=0, max_tokens=_NUM_TOKENS, ignore_eos=True, logprobs=0)
    expected = alone.generate([list(prompt) for prompt in prompts], params)
    flags = ("--quantization", "int4", "--activation-dtype", "int8")
    with relaying(tmp_path, folder, *flags) as relay, ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(partial(ask, relay.client), prompts))
    for (answer, transfer), one in zip(answers, expected, strict=True):
        assert answer.token_ids == tuple(one.token_ids)
        assert answer.logprobs == pytest.approx([each.logprob for each in one.logprobs], abs=1e-6)
        assert transfer is not None
