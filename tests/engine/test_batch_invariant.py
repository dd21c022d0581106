"""A request's tokens and log probabilities do not depend on what else is in its batches; where they might, no engine
that promises it starts."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from baton import LLM, SamplingParams
from baton.engine.build import build_engine
from baton.engine.runner.kv_memory import allocate_private
from baton.engine.settings import EngineSettings
from baton.wire.errors import InvalidSetting
from tests.checkpoints import make_checkpoint, write_tokenizer
from tests.engine.models.families import COMMON, make_model

NUM_PROMPTS = 24


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("invariant"), "llama", changes={"vocab_size": 33_000})


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    make_model(folder, "qwen3-moe", {**COMMON, "vocab_size": 320})
    write_tokenizer(folder, 320, 512)
    return folder


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_requests_alone_and_together_have_the_same_bits(checkpoint: Path, temperature: float) -> None:
    assert_same_bits(checkpoint, temperature)


def test_experts_have_the_same_bits_too(mixture: Path) -> None:
    assert_same_bits(mixture, 0.0)


def assert_same_bits(folder: Path, temperature: float) -> None:
    chance = random.Random(7)
    prompts = [[chance.randrange(300) for _ in range(chance.randrange(3, 90))] for _ in range(NUM_PROMPTS)]
    sampling = SamplingParams(temperature=temperature, seed=11, max_tokens=12, ignore_eos=True, logprobs=3)
    # small chunks cut prompts at other places when others share the step
    settings: dict[str, Any] = {
        "num_threads": 2,
        "num_blocks": 512,
        "max_num_batched_tokens": 48,
        "enable_prefix_caching": False,
    }
    llm = LLM(str(folder), batch_invariant=True, **settings)
    alone = [llm.generate(prompt, sampling)[0] for prompt in prompts]
    together = llm.generate(prompts, sampling)
    assert [(each.token_ids, each.logprobs) for each in together] == [(each.token_ids, each.logprobs) for each in alone]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"cpu_kernels": "torch"}, "needs Baton's CPU kernels"),
        ({"attention_backend": "torch"}, "attention is computed by torch"),
        ({"device": "emulated"}, "needs Baton's CPU kernels"),
    ],
)
def test_no_engine_starts_that_cannot_promise_it(checkpoint: Path, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidSetting, match=reason):
        LLM(str(checkpoint), batch_invariant=True, num_threads=1, num_blocks=64, **settings)


def test_a_model_of_which_torch_computes_a_part_cannot_promise_it(tmp_path: Path) -> None:
    make_model(tmp_path, "granite")
    with pytest.raises(InvalidSetting, match="torch computes a part of GraniteForCausalLM"):
        build_engine(
            EngineSettings(str(tmp_path), batch_invariant=True, num_threads=1, num_blocks=64), allocate_private
        )
