from __future__ import annotations

from baton.bench.client.endpoint import History, RequestOptions
from baton.bench.client.outcome import Outcome
from baton.bench.workload.dataset_settings import Conversation, Turn
from tests.bench.client.rig import endpoint

TWO_TURNS = Conversation((Turn((1, 2, 3), "Hello.", 8), Turn((4,), " And?", 6)))
HERE = endpoint("http://here")
CHAT = endpoint("http://here", "chat")


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


def test_ids_that_nobody_tells_are_filled_up() -> None:
    history = History(TWO_TURNS, HERE, RequestOptions())
    history.next_body()
    history.add_answer(answer("", num_tokens=5))
    assert history.next_body()["prompt"] == [1, 2, 3, 1, 2, 3, 1, 2, 4]


def test_text_is_followed_by_the_text_of_the_answer() -> None:
    history = History(TWO_TURNS, HERE, RequestOptions("text"))
    assert history.next_body()["prompt"] == "Hello."
    history.add_answer(answer(" Hi."))
    assert history.next_body()["prompt"] == "Hello. Hi. And?"
    assert history.num_prompt_tokens == 3 + 2 + 1


def test_a_chat_is_a_list_of_messages() -> None:
    history = History(TWO_TURNS, CHAT, RequestOptions("chat"))
    first = history.next_body()
    assert (first["messages"], first["max_completion_tokens"]) == ([{"role": "user", "content": "Hello."}], 8)
    assert "prompt" not in first
    history.add_answer(answer("Hi."))
    assert history.next_body()["messages"] == [
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": " And?"},
    ]
    assert len(first["messages"]) == 1  # a body that was sent does not grow


def test_only_baton_is_asked_for_timings() -> None:
    options = RequestOptions(with_timings=True)
    baton = endpoint("http://here", is_baton=True)
    assert "return_timings" not in History(TWO_TURNS, HERE, options).next_body()
    assert History(TWO_TURNS, baton, options).next_body()["return_timings"] is True
    assert "return_timings" not in History(TWO_TURNS, baton, RequestOptions()).next_body()
