from __future__ import annotations

from typing import Any

import pytest

from baton.bench.client.endpoint import CHAT_COMPLETIONS, PromptForm, RequestOptions, body_of, probe
from baton.bench.workload.dataset_settings import Prompt
from baton.wire.errors import RequestFailed
from tests.bench.client.raw_server import raw_server
from tests.bench.client.rig import PATIENCE_S, endpoint
from tests.bench.mock_server.schedule import Steady
from tests.bench.mock_server.server import MockOptions, mock_server

QUICK = Steady(0.0, 0.0)


async def test_baton_is_known_by_what_it_owns() -> None:
    async with mock_server(QUICK, MockOptions(owned_by="baton")) as server:
        assert (await probe(server.url, CHAT_COMPLETIONS, "mock", PATIENCE_S)).is_baton


async def test_a_server_without_a_list_needs_a_name() -> None:
    async with raw_server(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n") as url:
        with pytest.raises(RequestFailed, match="lists no model: name one"):
            await probe(url, CHAT_COMPLETIONS, "", PATIENCE_S)
    async with raw_server(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n") as url:
        assert (await probe(url, CHAT_COMPLETIONS, "mine", PATIENCE_S)).model == "mine"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 401 No\r\nContent-Length: 0\r\n\r\n", "answered 401"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n<>", "did not answer with JSON"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]", "lists no model"),
        (b"", "did not answer within 0.05 s"),
    ],
)
async def test_a_server_that_answers_otherwise_is_said(answer: bytes, message: str) -> None:
    async with raw_server(answer) as url:
        with pytest.raises(RequestFailed, match=message):
            await probe(url, CHAT_COMPLETIONS, "", 0.05 if not answer else PATIENCE_S)


PROMPT = Prompt((1, 2, 3), "Hello.", 8)
HERE = endpoint("http://here")


@pytest.mark.parametrize(
    ("form", "asked"),
    [
        ("ids", {"prompt": [1, 2, 3], "max_tokens": 8}),
        ("text", {"prompt": "Hello.", "max_tokens": 8}),
        ("chat", {"messages": [{"role": "user", "content": "Hello."}], "max_completion_tokens": 8}),
    ],
)
def test_a_prompt_has_three_forms(form: PromptForm, asked: dict[str, Any]) -> None:
    assert body_of(PROMPT, HERE, RequestOptions(form, ignore_eos=True, temperature=0.0)) == {
        **asked,
        "model": "mock",
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
        "ignore_eos": True,
    }


def test_only_baton_is_asked_for_timings() -> None:
    baton = endpoint("http://here", is_baton=True)
    assert "return_timings" not in body_of(PROMPT, HERE, RequestOptions())
    assert body_of(PROMPT, baton, RequestOptions())["return_timings"] is True
