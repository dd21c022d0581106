from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from baton import LLM, SamplingParams
from baton.engine.core import EngineCore
from baton.wire.errors import InvalidRequest
from tests.checkpoints import make_checkpoint

PROMPTS = ["The quick brown fox", "Once upon a time there was", "1 + 1 ="]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llm"), "qwen2")


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    return LLM(str(checkpoint), num_threads=1, num_blocks=64)


def test_what_loading_has_freed_is_given_back_once_the_weights_are_there(checkpoint: Path) -> None:
    with mock.patch("baton.engine.model_shard.return_freed_memory") as given_back:
        LLM(str(checkpoint), num_threads=1, num_blocks=4)
    given_back.assert_called_once_with()


def test_a_batch_equals_transformers_prompt_by_prompt(checkpoint: Path, llm: LLM) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    for prompt, completion in zip(PROMPTS, llm.generate(PROMPTS, GREEDY), strict=True):
        inputs = tokenizer(prompt, return_tensors="pt")
        expected = model.generate(
            **inputs, do_sample=False, max_new_tokens=12, min_new_tokens=12, pad_token_id=0, eos_token_id=None
        )
        new_ids = expected[0, inputs["input_ids"].shape[1] :].tolist()
        assert list(completion.prompt_token_ids) == inputs["input_ids"][0].tolist()
        assert list(completion.token_ids) == new_ids
        assert completion.text == tokenizer.decode(new_ids, skip_special_tokens=True)
        assert len(completion.logprobs) == 12
        assert completion.finish_reason == "length"


def test_text_and_its_token_ids_are_the_same_prompt(llm: LLM) -> None:
    as_text = llm.generate(PROMPTS[0], GREEDY)[0]
    assert llm.generate(list(as_text.prompt_token_ids), GREEDY)[0].token_ids == as_text.token_ids
    assert llm.generate([list(as_text.prompt_token_ids)], GREEDY)[0].token_ids == as_text.token_ids


def test_a_prediction_reaches_the_engine_as_tokens_and_changes_nothing(checkpoint: Path, llm: LLM) -> None:
    plain = llm.generate(PROMPTS[0], GREEDY)[0]
    with mock.patch.object(EngineCore, "add", autospec=True, side_effect=EngineCore.add) as add:
        predicted = llm.generate(PROMPTS[0], replace(GREEDY, prediction=plain.text))[0]
    assert (predicted.token_ids, predicted.logprobs) == (plain.token_ids, plain.logprobs)
    expected = AutoTokenizer.from_pretrained(checkpoint)(plain.text, add_special_tokens=False)["input_ids"]
    assert add.call_args.args[3].prediction_ids == tuple(expected)


def test_log_probabilities_of_a_prompt_are_those_that_it_has_as_output(llm: LLM) -> None:
    whole = llm.generate(PROMPTS[0], GREEDY)[0]
    token_ids = [*whole.prompt_token_ids, *whole.token_ids]
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2)
    first, *others = llm.generate(token_ids, asked)[0].prompt_logprobs
    assert (first, len(others)) == (None, len(token_ids) - 1)
    for found, expected in zip(others[-12:], whole.logprobs, strict=True):
        assert found is not None
        assert (found.rank, found.top_ids) == (1, expected.top_ids)
        assert found.logprob == pytest.approx(expected.logprob, abs=1e-4)
    assert whole.prompt_logprobs == ()


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    whole = llm.generate(PROMPTS[0], GREEDY)[0].text
    stop = whole[3:6]
    stopped = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=(stop,)))[0]
    assert stopped.text == whole[: whole.index(stop)]
    assert stopped.finish_reason == "stop"


def test_a_stop_string_does_not_count_before_min_tokens(llm: LLM) -> None:
    whole = llm.generate(PROMPTS[0], GREEDY)[0]
    stop = whole.text[0]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=(stop,), min_tokens=12)
    kept = llm.generate(PROMPTS[0], params)[0]
    assert (kept.text, kept.token_ids, kept.finish_reason) == (whole.text, whole.token_ids, "length")


@pytest.mark.parametrize("is_included", [False, True])
def test_a_stop_token_has_text_only_where_the_stop_is_included(llm: LLM, is_included: bool) -> None:
    whole = llm.generate(PROMPTS[0], GREEDY)[0]
    stop_id = whole.token_ids[-1]
    num_tokens = whole.token_ids.index(stop_id) + 1
    params = SamplingParams(
        temperature=0, max_tokens=12, stop_token_ids=(stop_id,), include_stop_str_in_output=is_included
    )
    stopped = llm.generate(PROMPTS[0], params)[0]
    shown = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=num_tokens - (not is_included)))[0]
    assert (stopped.token_ids, stopped.finish_reason) == (whole.token_ids[:num_tokens], "stop")
    assert stopped.text == shown.text


def test_a_seed_repeats_and_no_seed_does_not(llm: LLM) -> None:
    seeded = SamplingParams(seed=7, max_tokens=12, ignore_eos=True)
    free = SamplingParams(max_tokens=12, ignore_eos=True)
    first, second = llm.generate([PROMPTS[0]] * 2, seeded)
    assert first.token_ids == second.token_ids
    assert len({completion.token_ids for completion in llm.generate([PROMPTS[0]] * 6, free)}) > 1


def test_each_prompt_can_have_parameters_of_its_own(llm: LLM) -> None:
    short, long = llm.generate(
        PROMPTS[:2], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=5, ignore_eos=True)]
    )
    assert (len(short.token_ids), len(long.token_ids)) == (1, 5)
    with pytest.raises(InvalidRequest):
        llm.generate(PROMPTS[:2], [GREEDY])


def test_a_conversation_goes_through_the_chat_template(llm: LLM) -> None:
    answer = llm.chat([{"role": "user", "content": "Hello"}], GREEDY)
    prompt = llm.generate("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n", GREEDY)[0]
    assert (answer.prompt_token_ids, answer.token_ids) == (prompt.prompt_token_ids, prompt.token_ids)


def test_a_refused_prompt_leaves_nothing_behind(llm: LLM) -> None:
    for bad in ("", [10**6], list(range(300)) * 4):
        with pytest.raises(InvalidRequest):
            llm.generate([PROMPTS[0], bad], GREEDY)
    assert llm.generate(PROMPTS[0], GREEDY)[0].finish_reason == "length"


def test_importing_the_package_imports_no_torch() -> None:
    code = "import baton.engine, baton.wire.sampling, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=30).returncode == 0


def test_ranks_answer_as_one_does(checkpoint: Path, llm: LLM) -> None:
    divided = LLM(str(checkpoint), num_threads=1, num_blocks=64, tensor_parallel_size=2)
    alone, together = (each.generate(PROMPTS, GREEDY) for each in (llm, divided))
    assert [each.token_ids for each in together] == [each.token_ids for each in alone]
