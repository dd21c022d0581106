"""`echo` and `prompt_logprobs` over HTTP, with nodes that tell of a prompt what they are asked for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from baton.router.http.openai import prompt_report
from baton.router.http.openai.prompts import PromptMaker
from baton.wire.messages.legs import Decode, Prefill
from baton.wire.messages.membership import DECODE
from tests.router.fake_node import answering
from tests.router.http_client import post_chat, post_completion
from tests.router.rig import Server, serving

TEXT = " over the lazy dog"
PROMPT = "The quick brown fox jumps"


@pytest.fixture
async def server(prompts: PromptMaker) -> AsyncIterator[Server]:
    async with serving(prompts) as running:
        yield running


def _ids(prompts: PromptMaker, text: str = PROMPT) -> list[int]:
    return prompts.tokenizer.encode(text)


def _choice(reply: Any) -> dict[str, Any]:
    (choice,) = reply.json()["choices"]
    assert isinstance(choice, dict)
    return choice


async def test_an_echoed_prompt_precedes_text_and_logprobs(server: Server, prompts: PromptMaker) -> None:
    await server.rig.pair(answering(_ids(prompts, TEXT), "length"))
    choice = _choice(await post_completion(server, prompt=PROMPT, echo=True, logprobs=2, max_tokens=20))
    num_prompt, num_output = len(_ids(prompts)), len(_ids(prompts, TEXT))
    assert choice["text"] == PROMPT + TEXT
    found = choice["logprobs"]
    assert "".join(found["tokens"]) == PROMPT + TEXT
    assert found["token_logprobs"][:num_prompt] == [None, *(-float(place) for place in range(1, num_prompt))]
    assert found["token_logprobs"][num_prompt:] == [-0.5] * num_output
    assert found["top_logprobs"][0] is None
    # two alternatives of the node, and the prompt's own token
    assert found["top_logprobs"][1][found["tokens"][1]] == -1.0
    assert sorted(found["top_logprobs"][1].values()) == [-1.0, -0.25, -0.25]
    places = [sum(map(len, found["tokens"][:index])) for index in range(num_prompt + num_output)]
    assert found["text_offset"] == places
    assert {len(members) for members in found.values()} == {num_prompt + num_output}


@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize("of_text", [True, False])
async def test_an_echo_alone_generates_nothing(
    server: Server, prompts: PromptMaker, of_text: bool, logprobs: int | None
) -> None:
    prefill, decode = await server.rig.pair(answering(_ids(prompts, TEXT)[:1], "length"))
    prompt = PROMPT if of_text else _ids(prompts)
    reply = await post_completion(server, prompt=prompt, echo=True, max_tokens=0, logprobs=logprobs)
    choice = _choice(reply)
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    assert reply.json()["usage"]["completion_tokens"] == 0
    assert (await decode.expect(Decode)).params.max_tokens == 1
    leg = await prefill.expect(Prefill)
    assert leg.params.prompt_logprobs == logprobs
    if logprobs is None:
        assert choice["logprobs"] is None
    else:
        assert choice["logprobs"]["tokens"] == [prompts.tokenizer.token_text(one) for one in _ids(prompts)]
        assert len(choice["logprobs"]["token_logprobs"]) == len(_ids(prompts))


async def test_the_first_chunk_of_a_stream_holds_the_prompt(server: Server, prompts: PromptMaker) -> None:
    await server.rig.pair(answering(_ids(prompts, TEXT), "length"))
    chunks = (await post_completion(server, prompt=PROMPT, echo=True, logprobs=1, stream=True)).chunks
    first, *others = [chunk["choices"][0] for chunk in chunks]
    assert (first["text"], first["finish_reason"]) == (PROMPT, None)
    assert first["logprobs"]["token_logprobs"][:2] == [None, -1.0]
    assert "".join(choice["text"] for choice in others) == TEXT
    offsets = [offset for choice in others for offset in (choice["logprobs"] or {"text_offset": []})["text_offset"]]
    assert offsets[0] == len(PROMPT)


async def test_a_stream_that_echoes_alone(server: Server, prompts: PromptMaker) -> None:
    await server.rig.pair(answering(_ids(prompts, TEXT)[:1], "length"))
    chunks = (await post_completion(server, prompt=PROMPT, echo=True, max_tokens=0, stream=True)).chunks
    assert [(chunk["choices"][0]["text"], chunk["choices"][0]["finish_reason"]) for chunk in chunks] == [
        (PROMPT, None),
        ("", "length"),
    ]


async def test_several_choices_of_several_prompts_share_what_is_told(server: Server, prompts: PromptMaker) -> None:
    decode = await server.rig.join(DECODE, answering(_ids(prompts, TEXT), "length"))
    texts = [PROMPT, "Once upon a time"]
    reply = await post_completion(server, prompt=texts, n=2, echo=True, logprobs=1)
    choices = reply.json()["choices"]
    assert [choice["text"] for choice in choices] == [text + TEXT for text in texts for _ in range(2)]
    assert choices[0]["logprobs"] == choices[1]["logprobs"]
    legs = [await decode.expect(Decode) for _ in texts]
    assert [(len(leg.forks), leg.params.prompt_logprobs) for leg in legs] == [(1, 1), (1, 1)]
    assert not decode.has(Decode)


async def test_a_loglikelihood_request_of_lm_eval_can_be_read_as_it_reads_it(
    server: Server, prompts: PromptMaker
) -> None:
    await server.rig.pair(answering([7], "length"))
    asked = [_ids(prompts, text) for text in (PROMPT, "Once upon a time there was")]
    body = {"prompt": asked, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    for token_ids, choice in zip(asked, (await post_completion(server, **body)).json()["choices"], strict=True):
        for num_context in range(1, len(token_ids)):
            found = choice["logprobs"]["token_logprobs"][num_context:-1]
            tops = choice["logprobs"]["top_logprobs"][num_context:-1]
            assert found == [-float(place) for place in range(num_context, len(token_ids))]
            assert [max(top.values()) for top in tops] == [-0.25] * len(found)


async def test_prompt_logprobs_are_listed_by_token_id(server: Server, prompts: PromptMaker) -> None:
    decode = await server.rig.join(DECODE, answering(_ids(prompts, TEXT), "length"))
    choice = _choice(await post_completion(server, prompt=PROMPT, prompt_logprobs=2))
    first, second, *others = choice["prompt_logprobs"]
    assert first is None
    own = str(_ids(prompts)[1])
    assert list(second) == [own, "100", "101"]
    assert second[own] == {"logprob": -1.0, "rank": 1, "decoded_token": prompts.tokenizer.token_text(int(own))}
    assert (second["101"]["logprob"], second["101"]["rank"]) == (-0.25, 2)
    assert len(others) == len(_ids(prompts)) - 2
    assert choice["text"] == TEXT
    assert choice["logprobs"] is None
    assert (await decode.expect(Decode)).params.prompt_logprobs == 2


async def test_prompt_logprobs_of_a_chat_are_beside_its_choices(server: Server, prompts: PromptMaker) -> None:
    await server.rig.join(DECODE, answering(_ids(prompts, TEXT), "length"))
    answer = (await post_chat(server, prompt_logprobs=0, n=2)).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert [len(entry) for entry in answer["prompt_logprobs"][1:]] == [1] * (answer["usage"]["prompt_tokens"] - 1)
    assert len(answer["choices"]) == 2


async def test_a_prompt_that_ends_inside_a_character_is_echoed_whole(server: Server, prompts: PromptMaker) -> None:
    euro = _ids(prompts, "€")
    assert len(euro) == 3
    await server.rig.join(DECODE, answering([euro[2], *_ids(prompts, "!")], "length"))
    assert (
        _choice(await post_completion(server, prompt=[*_ids(prompts), *euro[:2]], echo=True))["text"] == f"{PROMPT}€!"
    )
    alone = await post_completion(server, prompt=[*_ids(prompts), *euro[:2]], echo=True, max_tokens=0)
    assert _choice(alone)["text"] == PROMPT + "\ufffd"


async def test_special_tokens_of_a_prompt_of_ids_are_echoed(server: Server, prompts: PromptMaker) -> None:
    await server.rig.join(DECODE, answering(_ids(prompts, "!"), "length"))
    text = "<|im_start|>user"
    assert _choice(await post_completion(server, prompt=_ids(prompts, text), echo=True))["text"] == f"{text}!"


@pytest.mark.parametrize("members", [{"echo": True, "logprobs": 5}, {"prompt_logprobs": 20}])
async def test_an_answer_holds_no_more_than_it_may(
    server: Server, prompts: PromptMaker, members: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    await server.rig.join(DECODE, answering(_ids(prompts, TEXT), "length"))
    monkeypatch.setattr(prompt_report, "MAX_ENTRIES", 21 * len(_ids(prompts)))
    assert (await post_completion(server, prompt=PROMPT, **members)).status == 200
    refused = await post_completion(server, prompt=[PROMPT] * 4, **members)
    assert (refused.status, refused.error["param"]) == (400, [*members][-1])


async def test_a_long_prompt_is_told_in_full(
    server: Server, prompts: PromptMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_report, "_MAX_INLINE_ENTRIES", 10)
    await server.rig.join(DECODE, answering(_ids(prompts, TEXT), "length"))
    choice = _choice(await post_completion(server, prompt=[[7] * 120], prompt_logprobs=1, echo=True, logprobs=0))
    assert len(choice["prompt_logprobs"]) == 120
    assert choice["logprobs"]["token_logprobs"][119] == -119.0


async def test_words_and_tokens_that_may_not_be_sampled_reach_the_nodes(server: Server, prompts: PromptMaker) -> None:
    decode = await server.rig.join(DECODE, answering(_ids(prompts, TEXT), "length"))
    reply = await post_completion(server, prompt=PROMPT, allowed_token_ids=[5, 6], bad_words=[" river", "x"])
    assert reply.status == 200
    params = (await decode.expect(Decode)).params
    assert params.allowed_token_ids == (5, 6)
    expected = ["river", " river", "x", " x"]
    assert params.bad_word_ids == tuple(tuple(_ids(prompts, text)) for text in expected)


async def test_an_allowed_token_outside_the_vocabulary_is_refused(server: Server) -> None:
    await server.rig.join(DECODE)
    reply = await post_completion(server, allowed_token_ids=[5, 320])
    assert (reply.status, reply.error["param"]) == (400, "allowed_token_ids")
