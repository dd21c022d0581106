"""Real programs answer mistakes of clients and operators clearly, and all other requests go on."""

from __future__ import annotations

import re
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import openai
import pytest

from tests.checkpoints import make_checkpoint
from tests.system.conftest import Checkpoints
from tests.system.harness import MODEL_NAME, START_TIMEOUT_S, Relay
from tests.system.reference import Reference, make_prompt


def test_a_prompt_beyond_the_context_is_refused(llama_relay: Relay) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        llama_relay.ask(make_prompt(600, 1))
    assert caught.value.code == "context_length_exceeded"
    assert "512" in str(caught.value)
    assert "600" in str(caught.value)


def test_an_unknown_model_is_refused(llama_relay: Relay) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        llama_relay.client.completions.create(model="nobody", prompt="Hello")
    assert caught.value.code == "model_not_found"
    assert "'nobody'" in str(caught.value)


@pytest.mark.parametrize("body", [b"", b"{", b'{"model": "tiny", "prompt": }', b"\xff\xfe", b"[]"])
def test_malformed_json_is_refused(llama_relay: Relay, body: bytes) -> None:
    request = urllib.request.Request(
        f"{llama_relay.router.address}/v1/completions", body, {"Content-Type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=10)
    with caught.value as answer:
        assert answer.code == 400
        assert b'"error"' in answer.read()


def test_nodes_that_cannot_work_say_why_and_do_not_disturb_others(
    llama_relay: Relay, checkpoints: Checkpoints, references: Callable[[str], Reference], tmp_path: Path
) -> None:
    whole = checkpoints("llama")
    empty = Path(shutil.copytree(whole, tmp_path / "empty"))
    (empty / "model.safetensors").unlink()
    cut = Path(shutil.copytree(whole, tmp_path / "cut"))
    weights = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    other = make_checkpoint(tmp_path / "other", "llama", seed=1)
    launched = {
        "no weights": llama_relay.launch("decode", model=empty),
        "truncated weights": llama_relay.launch("prefill", model=cut),
        "another model": llama_relay.launch("decode", model=other),
        "another block size": llama_relay.launch("prefill", "--block-size", "32"),
    }
    wanted = {
        "no weights": ("safetensors",),
        "truncated weights": ("model.safetensors",),
        "another model": ("model differs", "fingerprint"),
        "another block size": ("block_size", "16", "32"),
    }
    prompt = make_prompt(50, 2)
    try:
        statuses = [node.wait_exit(START_TIMEOUT_S) for node in launched.values()]
    finally:
        for node in launched.values():
            node.kill()
    assert statuses == [2, 2, 1, 1], "files that cannot be used, and nodes that the router refused"
    for name, node in launched.items():
        errors = [line for line in node.err.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1, f"{name}: {node.err}"
        assert "Traceback" not in node.err
        assert all(word in errors[0] for word in wanted[name]), errors[0]
        if name == "another model":
            assert len(set(re.findall(r"\b[0-9a-f]{32}\b", errors[0]))) == 2
    assert llama_relay.ask(prompt).token_ids == references("llama").greedy(prompt).token_ids
    llama_relay.wait_for_members()


def test_text_prompts_and_chat_work_beside_token_ids(llama_relay: Relay) -> None:
    reply = llama_relay.client.chat.completions.create(
        model=MODEL_NAME, messages=[{"role": "user", "content": "Hello there"}], max_tokens=8, temperature=0
    )
    assert reply.usage is not None
    assert reply.usage.completion_tokens <= 8
    assert llama_relay.ask("Once upon a time there was a small engine", max_tokens=8).finish_reason == "length"
