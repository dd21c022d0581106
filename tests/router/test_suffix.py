"""`suffix` of /v1/completions: the middle of a text, where the model's tokenizer has tokens for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers

from baton.engine.text.tokenizer import Tokenizer
from baton.router.http.openai.prompts import PromptMaker
from baton.wire.messages.legs import Decode
from tests.router.fake_node import answering
from tests.router.http_client import post_completion
from tests.router.rig import serving

NAMES = ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>")


@pytest.fixture
def coder(checkpoint: Path, prompts: PromptMaker) -> PromptMaker:
    backend = tokenizers.Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    backend.add_special_tokens([tokenizers.AddedToken(name, normalized=False) for name in NAMES])
    return PromptMaker(Tokenizer(backend), prompts.template, prompts.grammars)


async def test_a_suffix_becomes_a_prompt_for_the_middle(coder: PromptMaker) -> None:
    async with serving(coder) as server:
        _, decode = await server.rig.pair(answering(coder.tokenizer.encode("middle"), "length"))
        assert (await post_completion(server, prompt="before", suffix="after")).status == 200
        leg = await decode.expect(Decode)
        assert (
            coder.tokenizer.decode(leg.prompt.token_ids, skip_special_tokens=False) == "▁<PRE>before▁<SUF>after▁<MID>"
        )
        assert leg.params.stop_token_ids == (coder.tokenizer.added_token_id("▁<EOT>"),)


@pytest.mark.parametrize("suffix", ["", None])
async def test_an_empty_suffix_asks_for_nothing(coder: PromptMaker, suffix: str | None) -> None:
    async with serving(coder) as server:
        _, decode = await server.rig.pair(answering(coder.tokenizer.encode("middle"), "length"))
        assert (await post_completion(server, prompt="before", suffix=suffix)).status == 200
        leg = await decode.expect(Decode)
        assert (leg.prompt.token_ids, leg.params.stop_token_ids) == (tuple(coder.tokenizer.encode("before")), ())


async def test_a_suffix_is_refused_where_it_cannot_be_served(coder: PromptMaker, prompts: PromptMaker) -> None:
    async with serving(prompts) as server:
        await server.rig.pair()
        error = (await post_completion(server, suffix="after")).error
        assert (error["param"], error["code"]) == ("suffix", "unsupported_parameter")
        assert "no fill-in-the-middle tokens" in error["message"]
    async with serving(coder) as server:
        await server.rig.pair()
        assert (await post_completion(server, prompt=[1, 2], suffix="after")).error["param"] == "suffix"
        many = await post_completion(server, prompt=["x"] * 100, suffix="y" * 20_000)
        assert many.error["code"] == "string_above_max_length"
