"""Log probabilities of prompts equal those of transformers, each token's once, however the prompt is computed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.device.base import Device
from baton.engine.build import Engine, build_engine
from baton.engine.core import EngineCore
from baton.engine.runner import readings
from baton.engine.runner.kv_memory import allocate_private
from baton.engine.settings import EngineSettings
from baton.wire.prompt import Prompt
from baton.wire.prompt_logprobs import PromptTokenLogprobs, read_rows
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams
from tests.checkpoints import make_checkpoint
from tests.request_keys import A, B, C, key_of

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
BLOCK_SIZE = 8
TOLERANCE = 1e-4
NUM_TOP = 3
SCORED = DecodingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=NUM_TOP)
PLAIN = DecodingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module", params=FAMILIES)
def any_checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / request.param, request.param)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "qwen3", "qwen3")


@pytest.fixture
def engines() -> Iterator[list[Device]]:
    """The devices of the engines that a test makes, closed at its end."""
    devices: list[Device] = []
    yield devices
    for device in devices:
        device.close()


def new_engine(folder: Path, **settings: Any) -> Engine:
    chosen = {"block_size": BLOCK_SIZE, "num_blocks": 64, "num_threads": 1, **settings}
    return build_engine(EngineSettings(model=str(folder), **chosen), allocate_private)


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return random.Random(1000 * seed + num_tokens).choices(range(300), k=num_tokens)


@cache
def reference(folder: Path) -> Any:
    """The checkpoint in transformers."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


class Prompts:
    """What an engine tells of prompts, in order. Fails when something is told twice or left out."""

    def __init__(self) -> None:
        self.known: dict[RequestKey, list[PromptTokenLogprobs]] = {}
        self.num_cached: dict[RequestKey, int] = {}

    def drive(self, core: EngineCore, max_steps: int = 400) -> None:
        for _ in range(max_steps):
            if not core.has_work:
                return
            outputs = core.step()
            for output in outputs:
                if (read := output.read) is not None:
                    assert read.is_valid
                    found = self.known.setdefault(output.key, [])
                    assert read.first_row == len(found)
                    found += read_rows(read.values, read.num_rows)
                self.num_cached[output.key] = output.num_cached_tokens
            core.check()
        raise AssertionError("the engine did not finish")


def require_equal(
    found: Sequence[PromptTokenLogprobs], folder: Path, token_ids: Sequence[int], num_top: int = NUM_TOP
) -> None:
    """One row for each token but the first: values of transformers, alternatives in order, a rank that fits them."""
    model = reference(folder)
    with torch.inference_mode():
        expected = torch.log_softmax(model(torch.tensor([list(token_ids)])).logits[0], dim=-1)
    assert len(found) == len(token_ids) - 1
    for place, row in enumerate(found):
        token_id = token_ids[place + 1]
        assert row.logprob == pytest.approx(expected[place, token_id].item(), abs=TOLERANCE)
        values, ids = expected[place].topk(num_top)
        assert row.top_ids == tuple(ids.tolist())
        assert row.top_logprobs == pytest.approx(values.tolist(), abs=TOLERANCE)
        assert row.rank == 1 + int((expected[place] > expected[place, token_id]).sum())


@pytest.mark.parametrize("budget", [7, 512])
def test_they_are_those_of_transformers_also_where_the_prompt_is_cached(any_checkpoint: Path, budget: int) -> None:
    core = new_engine(any_checkpoint, max_num_batched_tokens=budget).core
    seen = Prompts()
    prompts = {key_of(length): prompt(length) for length in (2, 7, 8, 29, 50)}
    for key, token_ids in prompts.items():
        core.add(key, Prompt.of(token_ids), SCORED)
    core.add(key_of(1), Prompt.of(prompt(1)), SCORED)
    core.add(key_of("silent"), Prompt.of(prompt(33)), PLAIN)
    seen.drive(core)
    again = key_of(50, 2)
    core.add(again, Prompt.of(prompt(50)), SCORED)
    seen.drive(core)
    assert seen.known.keys() == {*prompts, again}
    for key, token_ids in {**prompts, again: prompt(50)}.items():
        require_equal(seen.known[key], any_checkpoint, token_ids)
    assert seen.num_cached[again] == 0
    core.add(key_of("plain again"), Prompt.of(prompt(50)), PLAIN)
    seen.drive(core)
    assert seen.num_cached[key_of("plain again")] == 48


def test_rows_are_computed_in_pieces(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readings, "PIECE_ELEMENTS", 5 * 320)
    core, seen = new_engine(checkpoint, max_num_batched_tokens=64).core, Prompts()
    core.add(A, Prompt.of(prompt(33)), SCORED)
    core.add(B, Prompt.of(prompt(20)), DecodingParams(max_tokens=1, prompt_logprobs=0))
    seen.drive(core)
    require_equal(seen.known[A], checkpoint, prompt(33))
    assert [row.top_ids for row in seen.known[B]] == [()] * 19


def test_a_prompt_that_is_computed_again_is_told_once(checkpoint: Path, engines: list[Device]) -> None:
    engine = new_engine(checkpoint, num_blocks=9, max_num_batched_tokens=5, max_num_seqs=8)
    params = DecodingParams(temperature=0, max_tokens=20, ignore_eos=True, prompt_logprobs=NUM_TOP)
    seen = Prompts()
    for number in range(5):
        engine.core.add(key_of(number), Prompt.of(prompt(14, seed=number)), params)
    seen.drive(engine.core)
    assert engine.core.status().num_preemptions > 0
    for number in range(5):
        require_equal(seen.known[key_of(number)], checkpoint, prompt(14, seed=number))


@pytest.mark.parametrize("budget", [1, 5, 64])
def test_they_are_the_same_while_steps_are_in_flight(checkpoint: Path, engines: list[Device], budget: int) -> None:
    engine = new_engine(checkpoint, device="emulated", max_num_batched_tokens=budget, max_num_seqs=4)
    engines.append(engine.device)
    seen = Prompts()
    core = engine.core
    core.add(A, Prompt.of(prompt(30)), SCORED)
    core.add(B, Prompt.of(prompt(11)), PLAIN)
    core.add(C, Prompt.of(prompt(17)), SCORED, first_token_only=True)
    seen.drive(core)
    core.handoffs.release(C)
    require_equal(seen.known[A], checkpoint, prompt(30))
    require_equal(seen.known[C], checkpoint, prompt(17))


def test_output_of_an_earlier_attempt_is_no_prompt(checkpoint: Path) -> None:
    core, seen = new_engine(checkpoint, max_num_batched_tokens=6).core, Prompts()
    core.add(A, Prompt.of(prompt(13)), SCORED, output_ids=[1, 2, 3])
    seen.drive(core)
    require_equal(seen.known[A], checkpoint, prompt(13))
