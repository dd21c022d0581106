"""Answers of a given structure through the whole relay: token 1 of the prefill node and all others obey the grammar."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from baton.wire.grammar import CHOICE, JSON_SCHEMA, Grammar
from tests.engine.structured.answers import GRAMMARS
from tests.system.harness import BLOCK_SIZE, Answer, Relay
from tests.system.reference import make_prompt


def _asked(grammar: Grammar) -> dict[str, Any]:
    if grammar.kind == CHOICE:
        return {"guided_choice": json.loads(grammar.text)}
    return {"structured_outputs": {"json" if grammar.kind == JSON_SCHEMA else grammar.kind: grammar.text}}


def test_every_kind_of_grammar_is_obeyed_on_every_kind_of_node(llama_relay: Relay) -> None:
    names = [name for name in GRAMMARS if name != "compact"]
    prompts = [make_prompt(length, 700) for length in (1, BLOCK_SIZE, 3 * BLOCK_SIZE + 5)]

    def ask(case: tuple[str, float, tuple[int, ...]]) -> Answer:
        name, temperature, prompt = case
        extra = {"ignore_eos": False, **_asked(GRAMMARS[name][0])}
        return llama_relay.ask(prompt, 110, temperature=temperature, seed=3, extra_body=extra)

    cases = [(name, temperature, prompt) for name in names for temperature in (0.0, 1.5) for prompt in prompts]
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(ask, cases))
    num_whole = 0
    for (name, _, _), answer in zip(cases, answers, strict=True):
        assert answer.finish_reason in ("stop", "length")
        if answer.finish_reason == "stop":
            assert GRAMMARS[name][1](answer.text), answer.text
            num_whole += 1
    assert num_whole > len(cases) // 2
    llama_relay.settle()
