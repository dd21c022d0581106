"""Several models behind one router: which are served, and to which nodes their requests go."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest

from router.openai.prompts import PromptMaker
from router.served_model import load_served_models
from tests.checkpoints import make_checkpoint
from tests.router.fake_node import FINGERPRINT, answering
from tests.router.rig import MODEL, serving
from wire.errors import InvalidSetting
from wire.messages import DECODE, PREFILL, Decode, Prefill

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
