"""Drafts in a real relay: tokens come from a prediction, the answer is the one without, and all count the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from baton.demo.location import checkpoint_path
from baton.wire.drafts import PREDICTION
from tests.system.conftest import running
from tests.system.harness import MODEL_NAME, Program, Relay, start_relay, wait_until

NGRAMS = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 8}')
NUM_TOKENS = 200
ASKED: dict[str, Any] = {
    "model": MODEL_NAME,
    "prompt": "Once upon a time there was",
    "max_tokens": NUM_TOKENS,
    "seed": 3,
    "extra_body": {"ignore_eos": True},
}


@pytest.fixture
def relay(relays: list[Relay], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Relay]:
    folder = tmp_path_factory.mktemp("speculation")
    started = start_relay(
        checkpoint_path(), folder, prefill=((),), decode=(NGRAMS,), router=("--metrics-aliases=vllm",)
    )
    yield from running(started, relays)


def predicted(relay: Relay, text: str) -> tuple[str, dict[str, Any]]:
    """The answer with the prediction `text`, and what its usage says of drafts."""
    body = {**ASKED["extra_body"], "prediction": {"type": "content", "content": text}}
    answer = relay.client.completions.create(**ASKED | {"extra_body": body})
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    return answer.choices[0].text, answer.usage.completion_tokens_details.to_dict()


def test_a_prediction_is_drafted_from_and_answers_node_and_router_count_the_same(relay: Relay) -> None:
    """How many drafts there are follows what steps are seen to cost, so it is asked until there are some."""
    text = relay.client.completions.create(**ASKED).choices[0].text
    told = {"steps": 0, "tokens": 0, "accepted": 0}

    def num_accepted(guess: str) -> int:
        answer, details = predicted(relay, guess)
        assert answer == text
        drafts: dict[str, int] = details.get("drafts", {}).get(PREDICTION, dict.fromkeys(told, 0))
        assert details["accepted_prediction_tokens"] == drafts["accepted"]
        assert details["rejected_prediction_tokens"] == drafts["tokens"] - drafts["accepted"]
        told.update({name: told[name] + drafts[name] for name in told})
        return drafts["accepted"]

    num_accepted("nothing of this is ever said: 1 2 3 4 5 6 7 8 9 " * 20)
    what = "an answer has most of its tokens from its prediction"
    wait_until(lambda: num_accepted(text) > NUM_TOKENS / 2, what, timeout_s=60.0)
    relay.settle()
    assert counts_at(relay.decodes[0]) == told
    wait_until(lambda: counts_at(relay.router) == told, "the router has heard of all drafts")


def counts_at(program: Program) -> dict[str, int]:
    """What its metrics say of tokens from predictions; nothing while they say nothing."""
    shown = program.metrics()
    names = {"steps": "num_drafts", "tokens": "num_draft_tokens", "accepted": "num_accepted_tokens"}
    with suppress(KeyError):
        return {name: shown.value(f"spec_decode_{of}_total", method=PREDICTION) for name, of in names.items()}
    return {}


def test_a_prediction_lives_on_when_the_node_that_drafts_dies(relay: Relay) -> None:
    text = relay.client.completions.create(**ASKED).choices[0].text
    relay.add("decode", *NGRAMS)
    body = {**ASKED["extra_body"], "prediction": {"type": "content", "content": text}}
    asked = ASKED | {"extra_body": body, "stream": True, "stream_options": {"include_usage": True}}
    pieces: list[str] = []
    with relay.client.completions.create(**asked) as stream:
        for chunk in stream:
            pieces += [choice.text for choice in chunk.choices]
            if len(pieces) == 2:
                busy = max(relay.decodes, key=lambda node: node.metrics().value("num_requests_running"))
                relay.drop(busy)
    assert "".join(pieces) == text
    assert chunk.usage is not None
    assert chunk.usage.completion_tokens == NUM_TOKENS
    details = chunk.usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens is not None
    assert 0 <= details.accepted_prediction_tokens < NUM_TOKENS
