from __future__ import annotations

import socket

import pytest

from baton.launch import api_client
from baton.launch.api_client import ApiClient, chat_body, describe_error
from baton.wire.errors import InvalidSetting, RequestFailed
from tests.launch.endpoint import FakeEndpoint


def ask(endpoint: FakeEndpoint, text: str) -> str:
    chunks = ApiClient(endpoint.url).stream_chat(chat_body("tiny", [{"role": "user", "content": text}], None, None))
    return "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])


def test_streams_the_answer(endpoint: FakeEndpoint) -> None:
    assert ask(endpoint, "hello") == "You said hello."


def test_asks_for_a_stream_and_leaves_unset_values_to_the_endpoint(endpoint: FakeEndpoint) -> None:
    ask(endpoint, "hello")
    message = {"role": "user", "content": "hello"}
    assert endpoint.bodies == [{"model": "tiny", "messages": [message], "stream": True}]


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_lists_models_whatever_the_end_of_the_url(endpoint: FakeEndpoint, suffix: str) -> None:
    assert ApiClient(endpoint.url + suffix, api_key="sesame").models() == ["tiny"]
    assert endpoint.authorizations == ["Bearer sesame"]


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ("refuse", r"temperature must be at most 2 \(HTTP 400\)"),
        ("fail", "both nodes died"),
        ("break", "the stream ended before the answer was complete"),
    ],
)
def test_a_failed_request_raises_the_reason(endpoint: FakeEndpoint, wish: str, message: str) -> None:
    with pytest.raises(RequestFailed, match=message):
        ask(endpoint, wish)


def test_closing_a_stream_early_closes_its_connection(endpoint: FakeEndpoint) -> None:
    chunks = ApiClient(endpoint.url).stream_chat(chat_body("tiny", [{"role": "user", "content": "hang"}], None, None))
    next(chunks)
    chunks.close()
    assert endpoint.client_left.wait(5)


def test_a_stream_that_breaks_off_is_resumed_behind_its_last_event(
    endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_client, "RESUME_PAUSE_S", 0.0)
    assert ask(endpoint, "resume") == "You said resume."
    assert endpoint.last_ids == [None, "s.1", "s.2"]
    assert all(body == endpoint.bodies[0] for body in endpoint.bodies)


@pytest.mark.parametrize(("wish", "bound_s"), [("forgotten", 60.0), ("down", 0.05)])
def test_a_stream_that_cannot_be_resumed_ends_with_the_reason(
    endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch, wish: str, bound_s: float
) -> None:
    monkeypatch.setattr(api_client, "RESUME_S", bound_s)
    monkeypatch.setattr(api_client, "RESUME_PAUSE_S", 0.01)
    with pytest.raises(RequestFailed, match=f"it is {wish}"):
        ask(endpoint, wish)
    assert set(endpoint.last_ids) == {None, "s.1"}


def test_nothing_listening_is_said_plainly() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(RequestFailed, match="nothing listens at http"):
            ApiClient(url).models()


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "http://host:port", "http://host:99999"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(InvalidSetting, match="--url"):
        ApiClient(url)


def test_an_error_names_the_field_it_is_about() -> None:
    assert describe_error({"error": {"message": "too large", "param": "n"}}) == "too large [n]"
