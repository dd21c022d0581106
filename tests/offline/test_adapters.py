"""Requests of a base and of adapters in one process: each has the tokens of its own weights, and KV of its own."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from baton import LLM, SamplingParams
from baton.offline.llm import Completion
from baton.wire.errors import InvalidRequest, InvalidSetting, ModelLoadError
from tests.checkpoints import make_checkpoint
from tests.engine.models.adapters.adapter_folders import LAYERS, RANK, merged, write_adapter
from tests.engine.models.families import make_model
from tests.engine.models.quantization.answers import dequantized
from tests.engine.test_offloading import load_whatever_is_there

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=2)
PROMPTS = [[(7 * place + 31 * number) % 300 for place in range(20 + 9 * number)] for number in range(6)]
NAMES = ["", "one", "two", "one", "", "two"]
SMALL: Mapping[str, Any] = {"num_threads": 1, "num_blocks": 128, "block_size": 4, "max_num_batched_tokens": 16}


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("base") / request.param, request.param)


@pytest.fixture(scope="module")
def adapters(base: Path) -> dict[str, Path]:
    """Of different ranks and matrices, the second of a part of the fused ones."""
    some = [name for name in LAYERS if name.endswith(("q_proj", "v_proj", "up_proj", "down_proj"))]
    return {
        "one": write_adapter(base.parent / "one", base, seed=1),
        "two": write_adapter(base.parent / "two", base, some, seed=2, r=2 * RANK, use_rslora=True),
    }


@pytest.fixture(scope="module")
def merged_models(base: Path, adapters: dict[str, Path]) -> dict[str, Path]:
    return {
        "": base,
        "one": merged(base, adapters["one"], base.parent / "one-merged"),
        "two": merged(base, adapters["two"], base.parent / "two-merged", scale=10 / (2 * RANK) ** 0.5),
    }


@pytest.fixture(scope="module")
def llm(base: Path, adapters: dict[str, Path]) -> LLM:
    return LLM(str(base), adapters=adapters, batch_invariant=True, enable_prefix_caching=False, **SMALL)


def results(completions: Sequence[Completion]) -> list[tuple[object, object]]:
    return [(each.token_ids, each.logprobs) for each in completions]


def assert_like(models: Mapping[str, Path], completions: Sequence[Completion], **settings: Any) -> None:
    """Each completion is what the model of its name gives, in which an adapter is a part of the weights."""
    served = {name: LLM(str(folder), **SMALL, **settings) for name, folder in models.items()}
    for prompt, name, found in zip(PROMPTS, NAMES, completions, strict=True):
        expected = served[name].generate(prompt, GREEDY)[0]
        assert found.token_ids == expected.token_ids
        for one, other in zip(found.logprobs, expected.logprobs, strict=True):
            assert one.top_logprobs == pytest.approx(other.top_logprobs, abs=2e-4)


def test_a_mixed_batch_has_the_tokens_of_weights_that_have_the_changes(
    llm: LLM, merged_models: dict[str, Path]
) -> None:
    completions = llm.generate(PROMPTS, GREEDY, adapter=NAMES)
    assert_like(merged_models, completions)
    assert len({each.token_ids for each in llm.generate([PROMPTS[0]] * 3, GREEDY, adapter=["", "one", "two"])}) == 3


def test_a_mixed_batch_has_the_bits_of_its_requests_alone_and_base_requests_those_without_adapters(
    llm: LLM, base: Path
) -> None:
    together = results(llm.generate(PROMPTS, GREEDY, adapter=NAMES))
    alone = [llm.generate(prompt, GREEDY, adapter=name)[0] for prompt, name in zip(PROMPTS, NAMES, strict=True)]
    assert together == results(alone)
    plain = results(LLM(str(base), batch_invariant=True, **SMALL).generate(PROMPTS, GREEDY))
    assert [found for found, name in zip(together, NAMES, strict=True) if not name] == [
        found for found, name in zip(plain, NAMES, strict=True) if not name
    ]


@pytest.mark.parametrize(
    "settings",
    [
        {"device": "emulated"},
        {"cpu_kernels": "torch"},
        {"enforce_eager": True},
        {"max_num_batched_tokens": 512},
        {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}'},
    ],
    ids=str,
)
def test_every_way_to_compute_a_step_adds_adapters(
    base: Path, adapters: dict[str, Path], merged_models: dict[str, Path], settings: dict[str, Any]
) -> None:
    completions = LLM(str(base), adapters=adapters, **{**SMALL, **settings}).generate(PROMPTS, GREEDY, adapter=NAMES)
    assert_like(merged_models, completions)


def test_adapters_are_added_to_quantized_weights_as_they_are(
    tmp_path: Path, base: Path, adapters: dict[str, Path]
) -> None:
    rounded = dequantized(base, tmp_path / "rounded", "int8")
    scales = {"one": 10 / RANK, "two": 10 / (2 * RANK) ** 0.5}
    models = {name: merged(rounded, adapters[name], tmp_path / name, scale=scale) for name, scale in scales.items()}
    served = LLM(str(base), adapters=adapters, quantization="int8", **SMALL)
    assert_like({"": rounded, **models}, served.generate(PROMPTS, GREEDY, adapter=NAMES))


@pytest.mark.parametrize("settings", [{}, {"num_blocks": 12, "kv_offloading_size": 0.01}], ids=["pool", "host tier"])
def test_kv_is_shared_by_prompts_of_the_same_adapter_only(
    base: Path, adapters: dict[str, Path], settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    load_whatever_is_there(monkeypatch)
    copy = shutil.copytree(adapters["one"], base.parent / "copy", dirs_exist_ok=True)
    llm = LLM(str(base), adapters={**adapters, "copy": copy}, **{**SMALL, **settings})

    def num_cached(name: str) -> int:
        return llm.generate(PROMPTS[0], GREEDY, adapter=name)[0].num_cached_tokens

    # what is in the folder counts, not what it is called
    assert [num_cached(name) for name in ("one", "two", "", "one", "copy", "two", "")] == [0, 0, 0, 16, 16, 16, 16]


def test_a_chat_is_answered_with_an_adapter(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    answers = {name: llm.chat(messages, GREEDY, adapter=name) for name in ("", "one")}
    assert answers[""].prompt_token_ids == answers["one"].prompt_token_ids
    assert answers[""].token_ids != answers["one"].token_ids


def test_names_that_are_not_there_are_refused_before_anything_is_computed(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="there is no adapter 'three'"):
        llm.generate(PROMPTS[:2], GREEDY, adapter=["one", "three"])
    with pytest.raises(InvalidRequest, match="1 adapters for 2 prompts"):
        llm.generate(PROMPTS[:2], GREEDY, adapter=["one"])


def test_adapters_are_refused_where_none_can_be_applied(tmp_path: Path, base: Path, adapters: dict[str, Path]) -> None:
    with pytest.raises(InvalidSetting, match="not applied by several ranks yet: use one"):
        LLM(str(base), adapters=adapters, tensor_parallel_size=2, **SMALL)
    make_model(tmp_path, "llama")
    with pytest.raises(InvalidSetting, match="not applied to LlamaForCausalLM, which transformers' modelling code"):
        LLM(str(tmp_path), adapters=adapters, model_impl="transformers", **SMALL)
    with pytest.raises(ModelLoadError, match=r"nowhere/adapter_config\.json: an adapter's config cannot be read"):
        LLM(str(base), adapters={"one": tmp_path / "nowhere"}, **SMALL)
