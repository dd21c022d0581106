"""A model with states in its blocks: what shares, loses and hands over blocks leaves its tokens as they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.engine.models.config import load_config
from baton.engine.scheduler.request import choices_of
from baton.wire.errors import InvalidSetting, ModelLoadError
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams
from tests.engine.models.families import make_model
from tests.engine.models.test_families import answers, assert_same, built, prompts
from tests.engine.test_core import note, run
from tests.request_keys import A, B, C, key_of

SAMPLED = DecodingParams(temperature=1.0, seed=11, max_tokens=9, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lfm2")
    make_model(path, "lfm2")
    return path


def changed(folder: Path, target: Path, **fields: object) -> Path:
    """A folder with the config in `folder`, with other fields in it."""
    content = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**content, **fields}))
    return target


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_tokens_equal_those_of_transformers_with_little_room(tmp_path: Path, device: str) -> None:
    model = make_model(tmp_path, "lfm2")
    engine = built(tmp_path, num_blocks=13, max_num_batched_tokens=24, device=device)
    one, other = prompts()
    for answer in answers(engine, one[:21], other[8:], one[:7]):
        assert_same(model, answer)
    assert engine.core.status().num_preemptions > 0


@pytest.mark.parametrize("device", ["cpu", "emulated"])
@pytest.mark.parametrize("length", [8, 21])
def test_choices_of_one_prompt_equal_separate_requests(folder: Path, length: int, device: str) -> None:
    prompt = prompts()[0][:length]
    separate: dict[RequestKey, list[int]] = {}
    alone = built(folder, enable_prefix_caching=False).core
    for key, own in choices_of((A, B, C), SAMPLED):
        alone.add(key, Prompt.of(prompt), own)
        separate |= run(alone)
    core = built(folder, device=device).core
    core.add(A, Prompt.of(prompt), SAMPLED, forks=(B, C))
    assert run(core) == separate


def test_a_request_is_handed_over_unless_a_step_changes_its_state(folder: Path) -> None:
    for device, is_handed in (("cpu", True), ("emulated", False)):
        core = built(folder, device=device).core
        core.add(A, Prompt.of(prompts()[0]), SAMPLED)
        found: dict[RequestKey, list[int]] = {}
        while len(found.get(A, ())) < 3:
            note(core.step(), found)
        assert (core.handoffs.hand_over(A, key_of("held")) is not None) == is_handed
        assert bool(core.num_steps_in_flight) != is_handed


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"layer_types": ["conv", "full_attention", "conv", "mamba"]}, "layer_types must be a list of 4 of full_att"),
        ({"layer_types": ["conv"] * 4}, "layer_types must be such that some layer is full_attention"),
        ({"conv_L_cache": 1}, "conv_L_cache must be at least 2"),
    ],
)
def test_convolutions_that_cannot_be_are_refused(
    folder: Path, tmp_path: Path, fields: dict[str, object], words: str
) -> None:
    with pytest.raises(ModelLoadError, match=words):
        load_config(changed(folder, tmp_path, **fields))


def test_rows_of_the_mlp_are_rounded_as_the_file_says(folder: Path, tmp_path: Path) -> None:
    def inner(**fields: object) -> int:
        return load_config(changed(folder, tmp_path, **fields)).intermediate_size

    assert inner(block_ff_dim=12288, block_multiple_of=256) == 8192
    assert inner(block_ff_dim=100, block_multiple_of=32) == 96
    assert inner(block_ff_dim=100, block_auto_adjust_ff_dim=False) == 100
    assert inner(layer_types=None, full_attn_idxs=[1]) == inner()


@pytest.mark.parametrize("family", ["lfm2", "qwen3-next"])
def test_what_a_block_held_before_changes_nothing(tmp_path: Path, family: str) -> None:
    model, engine = make_model(tmp_path, family), built(tmp_path)
    engine.memory.paged.blocks.fill_(float("nan"))
    for answer in answers(engine, prompts()[0], prompts()[0][:1]):
        assert_same(model, answer)


@pytest.mark.parametrize("family", ["lfm2", "qwen3-next"])
def test_states_lie_in_blocks_of_any_type(tmp_path: Path, family: str) -> None:
    make_model(tmp_path, family)
    found = []
    for budget in (8, 64):
        engine = built(tmp_path, dtype="bfloat16", max_num_batched_tokens=budget)
        (answer,) = answers(engine, prompts()[0])
        assert answer.tokens[0].logprobs is not None
        found.append((answer.tokens[0].token_id, answer.tokens[0].logprobs.logprob))
    assert found[0][0] == found[1][0]
    assert found[0][1] == pytest.approx(found[1][1], abs=0.1)


def test_heads_of_states_that_cannot_be_divided_are_named(tmp_path: Path) -> None:
    make_model(tmp_path, "qwen3-next")
    with pytest.raises(InvalidSetting, match="size 4: 2 key heads of a delta net cannot be divided among 4 ranks"):
        built(tmp_path, tensor_parallel_size=4)
