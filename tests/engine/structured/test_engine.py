"""Answers of random-weight models obey their grammar, whatever else is asked for, on a host and asynchronously."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton import LLM, SamplingParams
from baton.engine.build import build_engine
from baton.engine.core import EngineCore
from baton.engine.runner.kv_memory import allocate_private
from baton.engine.settings import EngineSettings
from baton.engine.text.tokenizer import Tokenizer
from baton.wire.errors import InvalidRequest
from baton.wire.grammar import Grammar
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams
from tests.engine.structured.answers import GRAMMARS
from tests.request_keys import key_of

PROMPT = "The answer is"
DIGITS = Grammar.regex("[0-9]{2,9}")


@pytest.fixture(scope="module", params=["cpu", "emulated"])
def llm(checkpoint: Path, request: pytest.FixtureRequest) -> LLM:
    return LLM(str(checkpoint), device=request.param, num_threads=1, num_blocks=128)


@pytest.fixture(scope="module")
def core(checkpoint: Path) -> EngineCore:
    settings = EngineSettings(model=str(checkpoint), device="emulated", num_threads=1, num_blocks=128)
    return build_engine(settings, allocate_private).core


def _finished(core: EngineCore) -> dict[RequestKey, list[int]]:
    """The tokens of all requests, once none is left."""
    found: dict[RequestKey, list[int]] = {}
    while core.has_work:
        for output in core.step():
            assert not output.has_failed, output.failure
            if output.tokens:
                found.setdefault(output.key, []).extend(output.token_ids)
        core.check()
    return found


def test_answers_obey_their_grammars_side_by_side(llm: LLM) -> None:
    free = SamplingParams(temperature=0.9, seed=1, max_tokens=40, ignore_eos=True)
    alone = llm.generate(PROMPT, free)[0]
    cases = [
        (name, SamplingParams(temperature=temperature, seed=seed, max_tokens=90, grammar=GRAMMARS[name][0]))
        for name in GRAMMARS
        for temperature, seed in ((0.0, 0), (1.5, 1))
    ]
    *answers, beside = llm.generate([PROMPT] * (len(cases) + 1), [*(params for _, params in cases), free])
    num_whole = 0
    for (name, _), answer in zip(cases, answers, strict=True):
        assert answer.finish_reason in ("stop", "length")
        if answer.finish_reason == "stop":
            assert GRAMMARS[name][1](answer.text), answer.text
            num_whole += 1
    assert num_whole > len(cases) // 2
    assert beside.token_ids == alone.token_ids


def test_penalties_bias_and_narrow_sampling_keep_to_the_grammar(llm: LLM) -> None:
    token_id = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=1))[0].token_ids[0]
    variants = [
        SamplingParams(seed=1, grammar=DIGITS, presence_penalty=2.0, repetition_penalty=1.5),
        SamplingParams(seed=2, grammar=DIGITS, logit_bias_ids=(token_id,), logit_bias_values=(100.0,)),
        SamplingParams(seed=3, grammar=DIGITS, top_k=1),
        SamplingParams(seed=4, grammar=DIGITS, top_p=0.01, min_p=0.5),
        SamplingParams(seed=5, grammar=DIGITS, top_k=2000, bad_word_ids=((token_id,),)),
    ]
    for answer in llm.generate([PROMPT] * len(variants), variants):
        assert answer.text.isdigit()
        assert 2 <= len(answer.text) <= 9


def test_an_end_comes_with_the_grammar_and_never_before_it(llm: LLM, checkpoint: Path) -> None:
    eos = max(Tokenizer.from_folder(checkpoint).eos_token_ids)
    wants_end: dict[str, Any] = {
        "temperature": 0.0,
        "logit_bias_ids": (eos,),
        "logit_bias_values": (100.0,),
        "max_tokens": 30,
    }
    variants = {
        2: SamplingParams(grammar=DIGITS, **wants_end),
        5: SamplingParams(grammar=DIGITS, min_tokens=5, **wants_end),
        9: SamplingParams(grammar=DIGITS, ignore_eos=True, **wants_end),
    }
    for length, answer in zip(variants, llm.generate([PROMPT] * 3, [*variants.values()]), strict=True):
        assert (len(answer.text), answer.finish_reason) == (length, "stop")
    cut = llm.generate(PROMPT, SamplingParams(temperature=0, grammar=Grammar.regex("[0-9]{9}"), max_tokens=4))[0]
    assert (len(cut.text), cut.finish_reason) == (4, "length")
    over = llm.generate(PROMPT, SamplingParams(temperature=0, grammar=Grammar.regex("[0-9]{3}"), min_tokens=20))[0]
    assert (len(over.text), over.finish_reason) == (3, "stop")


def test_log_probabilities_are_those_before_the_mask(llm: LLM) -> None:
    answer = llm.generate(PROMPT, SamplingParams(temperature=0, grammar=DIGITS, logprobs=1, max_tokens=4))[0]
    token_ids = [*answer.prompt_token_ids, *answer.token_ids]
    told = llm.generate(token_ids, SamplingParams(max_tokens=1, prompt_logprobs=1))[0].prompt_logprobs
    for found, raw in zip(answer.logprobs, told[-len(answer.token_ids) :], strict=True):
        assert raw is not None
        assert found.logprob == pytest.approx(raw.logprob, abs=1e-4)
        assert found.top_logprobs[0] >= found.logprob


def test_a_stop_string_ends_the_text_inside_of_the_grammar(llm: LLM) -> None:
    grammar = Grammar.regex("ab[0-9]cd")
    answer = llm.generate(PROMPT, SamplingParams(temperature=0, grammar=grammar, stop=("c",)))[0]
    assert answer.text[:2] == "ab"
    assert len(answer.text) == 3
    assert answer.finish_reason == "stop"


def test_a_grammar_and_allowed_tokens_without_a_common_one_fail_the_request_alone(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="no token in common"):
        llm.generate(PROMPT, SamplingParams(grammar=Grammar.regex("ab"), allowed_token_ids=(15,)))
    with pytest.raises(InvalidRequest, match="cannot be read: unclosed group"):
        llm.generate(PROMPT, SamplingParams(grammar=Grammar.regex("(")))
    assert llm.generate(PROMPT, SamplingParams(grammar=DIGITS, seed=1))[0].text.isdigit()


@pytest.mark.parametrize("num_known", [1, 5, 11])
def test_another_engine_goes_on_from_the_ids_alone(num_known: int, core: EngineCore, tokenizer: Tokenizer) -> None:
    grammar, obeys = GRAMMARS["compact"]
    params = DecodingParams(temperature=1.5, seed=11, max_tokens=120, grammar=grammar)
    prompt = tokenizer.encode(PROMPT)
    core.add(key_of("whole"), Prompt.of(prompt), params)
    whole = _finished(core)[key_of("whole")]
    assert len(whole) > num_known
    core.add(key_of("rest"), Prompt.of(prompt), params, output_ids=whole[:num_known])
    rest = _finished(core)[key_of("rest")]
    assert whole[:num_known] + rest == whole
    assert obeys(tokenizer.decode(whole))


def test_the_choices_of_a_prompt_have_a_matcher_each(core: EngineCore, tokenizer: Tokenizer) -> None:
    grammar, obeys = GRAMMARS["compact"]
    params = DecodingParams(temperature=1.5, seed=5, max_tokens=120, grammar=grammar)
    keys = [key_of(name) for name in "abcd"]
    core.add(keys[0], Prompt.of(tokenizer.encode(PROMPT)), params, forks=keys[1:])
    together = _finished(core)
    texts = [tokenizer.decode(together[key]) for key in keys]
    assert all(map(obeys, texts))
    assert len(set(texts)) > 1
    core.add(keys[2], Prompt.of(tokenizer.encode(PROMPT)), replace(params, choice=2))
    assert _finished(core)[keys[2]] == together[keys[2]]


def test_only_the_first_token_is_drawn_where_another_node_goes_on(core: EngineCore, tokenizer: Tokenizer) -> None:
    key, params = key_of("first"), DecodingParams(temperature=1.5, seed=3, grammar=Grammar.regex("x[0-9]"))
    core.add(key, Prompt.of(tokenizer.encode(PROMPT)), params, first_token_only=True)
    assert tokenizer.decode(_finished(core)[key]).startswith("x")
    assert core.handoffs.release(key)
