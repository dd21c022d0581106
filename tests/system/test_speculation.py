"""Drafts in a real relay: tokens come from a prediction, the answer is the one without, and all count the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from baton.demo.location import checkpoint_path
from baton.wire.drafts import PREDICTION
from tests.system.conftest import running
from tests.system.harness import MODEL_NAME, Relay, start_relay, wait_until

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


def test_a_prediction_saves_steps_and_answer_node_and_router_count_the_same(relay: Relay) -> None:
    (node,) = relay.decodes
    text = relay.client.completions.create(**ASKED).choices[0].text
    before = node.metrics()
    for guess in (text, "nothing of this is ever said: 1 2 3 4 5 6 7 8 9 " * 20):
        answer, details = predicted(relay, guess)
        assert answer == text
        accepted = details["accepted_prediction_tokens"]
        assert (accepted > NUM_TOKENS / 2) == (guess == text), details
    steps = node.metrics().value("steps_total") - before.value("steps_total")
    assert steps < 1.7 * NUM_TOKENS, "two answers"

    told = node.metrics()
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    counts = [told.value(f"spec_decode_{name}_total", method=PREDICTION) for name in names]
    assert 0 < counts[2] <= counts[1] <= 8 * counts[0]
    assert told.value("spec_decode_num_accepted_tokens_per_pos_total", method=PREDICTION) == counts[2]

    def router_knows() -> bool:
        shown = relay.router.metrics()
        with suppress(KeyError):  # before the next heartbeat
            return counts == [shown.value(f"spec_decode_{name}_total", method=PREDICTION) for name in names]
        return False

    wait_until(router_knows, "the router has heard of all drafts")


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
    assert NUM_TOKENS / 2 < details.accepted_prediction_tokens < NUM_TOKENS
