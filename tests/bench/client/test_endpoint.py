from __future__ import annotations

import pytest

from baton.bench.client.endpoint import History, RequestOptions, probe
from baton.bench.client.outcome import Outcome
from baton.bench.workload.dataset_settings import Conversation, Turn
from baton.wire.errors import RequestFailed
from tests.bench.client.raw_server import raw_server
from tests.bench.client.rig import PATIENCE_S, endpoint
from tests.bench.mock_server.schedule import Steady
from tests.bench.mock_server.server import MockOptions, mock_server

QUICK = Steady(0.0, 0.0)


async def test_baton_is_known_by_what_it_owns() -> None:
    async with mock_server(QUICK, MockOptions(owned_by="baton")) as server:
        assert (await probe(server.url, "chat", "mock", PATIENCE_S)).is_baton


async def test_a_server_without_a_list_needs_a_name() -> None:
    async with raw_server(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n") as url:
        with pytest.raises(RequestFailed, match="lists no model: name one"):
            await probe(url, "chat", "", PATIENCE_S)
    async with raw_server(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n") as url:
        assert (await probe(url, "chat", "mine", PATIENCE_S)).model == "mine"


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
            await probe(url, "chat", "", 0.05 if not answer else PATIENCE_S)


TWO_TURNS = Conversation((Turn((1, 2, 3), "Hello.", 8), Turn((4,), " And?", 6)))
HERE = endpoint("http://here")


def answer(text: str, ids: list[int] | None = None, num_tokens: int = 2) -> Outcome:
    return Outcome(0, 0, "", 0.0, text=text, output_ids=ids or [], num_output_tokens=num_tokens)


def test_ids_are_followed_by_the_ids_of_the_answer() -> None:
    history = History(TWO_TURNS, HERE, RequestOptions(ignore_eos=True, temperature=0.0))
    assert history.next_body() == {
        "model": "mock",
        "prompt": [1, 2, 3],
        "max_tokens": 8,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    assert (history.num_prompt_tokens, history.num_left) == (3, 1)
    history.add_answer(answer("ignored", [9, 8]))
    second = history.next_body()
    assert (second["prompt"], second["max_tokens"]) == ([1, 2, 3, 9, 8, 4], 6)
    assert "return_token_ids" not in second  # nothing follows that would need them
    assert (history.num_prompt_tokens, history.num_left) == (6, 0)


def test_text_is_followed_by_the_text_of_the_answer() -> None:
    history = History(TWO_TURNS, HERE, RequestOptions("text"))
    assert history.next_body()["prompt"] == "Hello."
    history.add_answer(answer(" Hi."))
    assert history.next_body()["prompt"] == "Hello. Hi. And?"
    assert history.num_prompt_tokens == 3 + 2 + 1


def test_only_baton_is_asked_for_timings() -> None:
    options = RequestOptions(with_timings=True)
    baton = endpoint("http://here", is_baton=True)
    assert "return_timings" not in History(TWO_TURNS, HERE, options).next_body()
    assert History(TWO_TURNS, baton, options).next_body()["return_timings"] is True
    assert "return_timings" not in History(TWO_TURNS, baton, RequestOptions()).next_body()
