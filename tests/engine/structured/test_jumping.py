"""Jumping ahead changes no token of an output, whatever else is asked for; it only saves steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.engine.build import build_engine
from baton.engine.core import EngineCore
from baton.engine.runner.kv_memory import allocate_private
from baton.engine.settings import EngineSettings
from baton.engine.text.tokenizer import Tokenizer
from baton.wire.grammar import Grammar
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams
from tests.engine.structured.answers import GRAMMARS
from tests.request_keys import key_of

PROMPTS = ("The answer is", "x", "In the beginning there was a schema, and it forced the names of all members")
FORCING = Grammar.json_schema(
    {
        "type": "object",
        "properties": {
            "identifier": {"enum": ["first value", "second value"]},
            "number_of_things": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["identifier", "number_of_things"],
        "additionalProperties": False,
    },
    "",
)
ALL = [FORCING, *(grammar for grammar, _ in GRAMMARS.values())]
VARIANTS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.5, "seed": 3},
    {"temperature": 1.0, "seed": 4, "repetition_penalty": 1.4, "presence_penalty": 0.7, "frequency_penalty": 0.2},
    {"temperature": 0.9, "seed": 5, "top_k": 40, "top_p": 0.9, "min_tokens": 12, "max_tokens": 20},
    {"temperature": 1.2, "seed": 6, "ignore_eos": True, "bad_word_ids": ((34,), (58, 34))},
    {"temperature": 1.1, "seed": 7, "stop_token_ids": (97, 110)},
]


def _core(checkpoint: Path, device: str, num_blocks: int) -> EngineCore:
    settings = EngineSettings(
        model=str(checkpoint),
        device=device,
        num_threads=1,
        num_blocks=num_blocks,
        enforce_eager=device != "cpu",
        max_num_batched_tokens=64,
        max_num_seqs=8,
    )
    return build_engine(settings, allocate_private).core


@pytest.fixture(scope="module", params=[("cpu", 128), ("emulated", 12)], ids=["roomy", "small-asynchronous"])
def core(checkpoint: Path, request: pytest.FixtureRequest) -> EngineCore:
    """The second has room for a few requests only, so that some are preempted."""
    return _core(checkpoint, *request.param)


def _outputs(core: EngineCore, asked: dict[RequestKey, tuple[list[int], DecodingParams]]) -> tuple[Any, int, int]:
    """Of all requests, computed together: tokens and finish reasons; how many steps there were and tokens forced."""
    tokens: dict[RequestKey, list[int]] = {key: [] for key in asked}
    reasons: dict[RequestKey, str] = {}
    num_steps = num_forced = 0
    for key, (prompt, params) in asked.items():
        core.add(key, Prompt.of(prompt), params)
    while core.has_work:
        outputs = core.step()
        core.check()
        num_steps += bool(outputs)
        for output in outputs:
            assert not output.has_failed, output.failure
            if output.tokens:
                assert output.output_index == len(tokens[output.key])
                tokens[output.key] += output.token_ids
                num_forced += output.num_forced
            if output.finish_reason:
                reasons[output.key] = output.finish_reason
    return (tokens, reasons), num_steps, num_forced


def test_outputs_are_those_of_a_step_for_each_token(core: EngineCore, tokenizer: Tokenizer) -> None:
    asked = {
        key_of(number): (
            tokenizer.encode(PROMPTS[number % len(PROMPTS)]),
            DecodingParams(**{"max_tokens": 40, **variant}, grammar=grammar),
        )
        for number, (grammar, variant) in enumerate((grammar, variant) for grammar in ALL for variant in VARIANTS)
    }
    jumping, few_steps, num_forced = _outputs(core, asked)
    # who wants log probabilities does not jump
    stepping, many_steps, none_forced = _outputs(
        core, {key: (prompt, replace(params, logprobs=0)) for key, (prompt, params) in asked.items()}
    )
    assert jumping == stepping
    assert none_forced == 0
    assert num_forced > 100
    assert few_steps < many_steps
    assert core.status().num_preemptions or core.status().num_free_blocks > 12


def test_an_output_goes_on_at_any_place_with_the_same_tokens(core: EngineCore, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(PROMPTS[0])
    params = DecodingParams(temperature=1.5, seed=11, max_tokens=120, grammar=FORCING)
    ((whole,), _), *_ = _whole(core, prompt, params)
    for num_known in range(1, len(whole), 7):
        core.add(key_of("rest"), Prompt.of(prompt), params, output_ids=whole[:num_known])
        rest: list[int] = []
        while core.has_work:
            for output in core.step():
                if output.tokens:
                    rest += output.token_ids
        assert whole[:num_known] + rest == whole


def _whole(core: EngineCore, prompt: list[int], params: DecodingParams) -> tuple[Any, int, int]:
    (tokens, reasons), num_steps, num_forced = _outputs(core, {key_of("whole"): (prompt, params)})
    return (list(tokens.values()), list(reasons.values())), num_steps, num_forced


def test_choices_of_a_prompt_jump_as_they_would_alone(core: EngineCore, tokenizer: Tokenizer) -> None:
    prompt, keys = tokenizer.encode(PROMPTS[0]), [key_of(name) for name in "abcd"]
    params = DecodingParams(temperature=1.5, seed=5, max_tokens=120, grammar=FORCING)
    core.add(keys[0], Prompt.of(prompt), params, forks=keys[1:])
    together: dict[RequestKey, list[int]] = {key: [] for key in keys}
    while core.has_work:
        for output in core.step():
            assert output.tokens or not output.has_left
            together[output.key] += output.token_ids
        core.check()
    for number, key in enumerate(keys):
        ((alone,), _), *_ = _whole(core, prompt, replace(params, choice=number, logprobs=0))
        assert together[key] == alone
