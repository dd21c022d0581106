"""A relay whose nodes have a draft model: real processes, tokens equal to those of transformers, over shm and zmq."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.system.conftest import Checkpoints
from tests.system.harness import BLOCK_SIZE, start_relay
from tests.system.reference import LOGPROB_TOLERANCE, Reference, make_prompt

_ROUTER = ("--decode-policy", "round_robin", "--local-prefill-tokens", "0")
_NUM_TOKENS = 24


def test_kv_of_a_draft_goes_with_each_handoff(
    tmp_path: Path, checkpoints: Checkpoints, references: Callable[[str], Reference]
) -> None:
    model = checkpoints("llama")
    config = json.dumps({"method": "draft_model", "model": str(model), "num_speculative_tokens": 3})
    node = ("--speculative-config", config, "--max-num-batched-tokens", "40")
    decode = [(*node, "--kv-transport", transport) for transport in ("shm", "zmq")]
    relay = start_relay(model, tmp_path, prefill=(node,), decode=decode, router=_ROUTER)
    try:
        prompts = [make_prompt(length, 1) for length in (1, BLOCK_SIZE, 5 * BLOCK_SIZE + 10) for _ in decode]
        prompts += [prompt + make_prompt(7, 2) for prompt in prompts]
        for number, answer in enumerate(relay.ask_all(prompts, 3, _NUM_TOKENS, logprobs=0)):
            expected = references("llama").greedy(prompts[number], _NUM_TOKENS)
            assert tuple(answer.token_ids) == expected.token_ids
            assert answer.logprobs == pytest.approx(expected.logprobs, abs=LOGPROB_TOLERANCE)
        relay.settle()
        delivered = [each.metrics().value("kv_receive_delivered_total") for each in relay.decodes]
        assert all(delivered)
        relay.stop()
    finally:
        relay.close()
