"""Token ids of texts and conversations, and texts of token ids, over HTTP."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from baton.router.http.openai.prompts import PromptMaker
from tests.router.fake_node import answering
from tests.router.http_client import Reply, chat_body, fetch, post_chat
from tests.router.rig import MODEL, Server, serving

TEXT = "Where does the river go?"


@pytest.fixture
async def server(prompts: PromptMaker) -> AsyncIterator[Server]:
    async with serving(prompts) as running:
        yield running


async def _post(server: Server, path: str, **members: Any) -> Reply:
    return await fetch(server, "POST", path, json.dumps(members).encode())


@pytest.mark.parametrize("length", [1, 400])
async def test_a_text_becomes_the_ids_of_a_prompt(server: Server, prompts: PromptMaker, length: int) -> None:
    await server.rig.pair()
    reply = await _post(server, "/tokenize", model=MODEL, prompt=TEXT * length, return_token_strs=True)
    ids = prompts.tokenizer.encode(TEXT * length)
    assert reply.json() == {
        "count": len(ids),
        "max_model_len": 256,
        "tokens": ids,
        "token_strs": [prompts.tokenizer.vocabulary_piece(token_id) for token_id in ids],
    }


async def test_special_tokens_are_left_out_on_request(server: Server, prompts: PromptMaker) -> None:
    for adds in (True, False):
        reply = await _post(server, "/tokenize", prompt=TEXT, add_special_tokens=adds)
        assert reply.json()["tokens"] == prompts.tokenizer.encode(TEXT, adds)
        assert reply.json()["token_strs"] is None


async def test_a_conversation_counts_as_many_tokens_as_its_chat(server: Server, prompts: PromptMaker) -> None:
    await server.rig.pair(answering(prompts.tokenizer.encode("abc"), "length"))
    usage = (await post_chat(server)).json()["usage"]
    reply = await _post(server, "/tokenize", **chat_body())
    assert reply.json()["count"] == usage["prompt_tokens"]


@pytest.mark.parametrize("text", [TEXT, "naïve 🦊 日本", ""])
async def test_ids_become_their_text_again(server: Server, prompts: PromptMaker, text: str) -> None:
    reply = await _post(server, "/detokenize", tokens=prompts.tokenizer.encode(text, add_special_tokens=False))
    assert reply.json() == {"prompt": text}


async def test_special_tokens_stay_in_the_text(server: Server, prompts: PromptMaker) -> None:
    ids = (await _post(server, "/tokenize", **chat_body())).json()["tokens"]
    reply = await _post(server, "/detokenize", tokens=ids)
    assert reply.json()["prompt"] == prompts.tokenizer.decode(ids, skip_special_tokens=False)
    assert reply.json()["prompt"] != prompts.tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("path", "members", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", **chat_body()}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "surprise": 1}, "surprise"),
        ("/tokenize", {"add_special_tokens": 1, **chat_body()}, "add_special_tokens"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [2**40]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
    ],
)
async def test_a_bad_body_is_refused_by_field(server: Server, path: str, members: dict[str, Any], param: str) -> None:
    reply = await _post(server, path, **members)
    assert (reply.status, reply.error["param"]) == (400, param)


@pytest.mark.parametrize(("path", "members"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})])
async def test_another_model_is_not_found(server: Server, path: str, members: dict[str, Any]) -> None:
    reply = await _post(server, path, model="org/other", **members)
    assert (reply.status, reply.error["code"]) == (404, "model_not_found")
