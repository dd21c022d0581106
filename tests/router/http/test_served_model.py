"""Several models behind one router: which are served, and to which nodes their requests go."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import openai
import pytest

from baton.engine.models.generation_defaults import GenerationDefaults
from baton.router.http.openai.prompts import PromptMaker
from baton.router.http.served_model import ModelOptions, load_served_models
from baton.wire.errors import InvalidSetting
from baton.wire.messages.legs import Decode, Prefill
from baton.wire.messages.membership import DECODE, PREFILL
from tests.checkpoints import make_checkpoint
from tests.router.fake_node import FINGERPRINT, answering
from tests.router.http_client import chat_body, completion_body, fetch
from tests.router.rig import MODEL, serving

OTHER = "org/other"


async def test_requests_go_to_the_nodes_of_their_model(prompts: PromptMaker) -> None:
    async with serving(prompts, models={MODEL: FINGERPRINT, OTHER: "1234"}) as server:
        for role in (PREFILL, DECODE):
            await server.rig.join(role, answering([5, 6, 7]))
        other = await server.rig.join(DECODE, answering([8, 9]), fingerprint="1234")
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            assert [model.id async for model in client.models.list()] == [MODEL, OTHER]
            for name, num_tokens in ((MODEL, 3), (MODEL, 3), (OTHER, 2), (OTHER, 2)):
                reply = await client.completions.create(model=name, prompt=list(range(10, 30)), max_tokens=num_tokens)
                assert reply.model == name
                assert reply.usage is not None
                assert reply.usage.completion_tokens == num_tokens
            with pytest.raises(openai.NotFoundError, match=f"serves '{MODEL}', '{OTHER}', not 'nobody'"):
                await client.completions.create(model="nobody", prompt="Hello")
        await other.expect(Decode)
        await other.expect(Decode)
        assert not other.has(Decode)
        assert not other.has(Prefill)


def test_each_model_has_a_name_and_weights_of_its_own(tmp_path: Path) -> None:
    one, two = make_checkpoint(tmp_path / "one", "llama"), make_checkpoint(tmp_path / "two", "qwen2")
    models = load_served_models(str(one), "first", [f"second={two}"], 7)
    assert [model.name for model in models] == ["first", "second"]
    assert len({model.fingerprint for model in models}) == 2
    with pytest.raises(InvalidSetting, match="'second' is not NAME=CHECKPOINT"):
        load_served_models(str(one), "first", ["second"], 7)
    with pytest.raises(InvalidSetting, match="the same name"):
        load_served_models(str(one), "first", [f"first={two}"], 7)
    with pytest.raises(InvalidSetting, match="two models are the same"):
        load_served_models(str(one), "first", [f"second={one}"], 7)
    for folder in (one, two):
        for path in folder.glob("*.safetensors*"):
            path.unlink()
    with pytest.raises(InvalidSetting, match="two models have no weights here"):
        load_served_models(str(one), "first", [f"second={two}"], 7)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
async def test_what_a_request_leaves_open_is_sampled_as_the_checkpoint_recommends(
    prompts: PromptMaker, path: str
) -> None:
    defaults = GenerationDefaults({"temperature": 0.6, "top_k": 20}, max_tokens=3)
    body = {"/v1/chat/completions": chat_body(), "/v1/completions": completion_body()}.get(
        path, {"model": MODEL, "input": "Where does the river go?"}
    )
    async with serving(prompts, defaults=defaults) as server:
        _, decode = await server.rig.pair(answering([5, 6, 7], "length"))
        for given, expected in (({}, (0.6, 20)), ({"temperature": 0.0}, (0.0, 20)), ({"top_k": None}, (0.6, 20))):
            reply = await fetch(server, "POST", path, json.dumps({**body, **given}).encode())
            assert reply.status == 200
            if path == "/v1/responses":
                assert reply.json()["temperature"] == expected[0]
            params = (await decode.expect(Decode)).params
            assert (params.temperature, params.top_k, params.max_tokens) == (*expected, 3)


def test_the_defaults_of_a_checkpoint_are_said_at_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "eos_token_id": 2}))
    with caplog.at_level(logging.INFO):
        (model,) = load_served_models(str(folder), "first", [], 7)
    assert model.defaults.values == {"temperature": 0.6}
    assert "requests to first that do not say otherwise have temperature 0.6 (see --generation-config)" in caplog.text
    (without,) = load_served_models(str(folder), "first", [], 7, ModelOptions(generation_config="none"))
    assert without.defaults == GenerationDefaults()


async def test_a_message_leaves_open_what_the_checkpoint_recommends(prompts: PromptMaker) -> None:
    defaults = GenerationDefaults({"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1})
    async with serving(prompts, defaults=defaults) as server:
        _, decode = await server.rig.pair(answering([5, 6, 7], "length"))
        for given, temperature in (({}, 0.6), ({"temperature": 0.0}, 0.0)):
            body = {"model": MODEL, "max_tokens": 3, "messages": [{"role": "user", "content": "Where?"}], **given}
            reply = await fetch(server, "POST", "/v1/messages", json.dumps(body).encode())
            assert reply.status == 200
            params = (await decode.expect(Decode)).params
            assert (params.temperature, params.top_k, params.repetition_penalty) == (temperature, 20, 1.1)
