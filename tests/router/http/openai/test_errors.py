"""Each error class has its place in the one table, and no answer says more than a client may know."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest

from baton.router.http.openai.errors import HTTP_OF, error_body, http_layer_body, retry_after, status_of
from baton.wire.errors import (
    BatonError,
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidMessage,
    InvalidRequest,
    ModelNotFound,
    NoNode,
    Overloaded,
    RateLimited,
    RequestFailed,
    TransferFailed,
    UnsupportedMediaType,
)


def _tree(root: type[BatonError]) -> Iterator[type[BatonError]]:
    yield root
    for child in root.__subclasses__():
        yield from _tree(child)


def test_every_class_of_the_tree_is_in_the_table() -> None:
    classes = {kind for kind in _tree(BatonError) if kind.__module__ == "baton.wire.errors"}
    assert classes == set(HTTP_OF)


@pytest.mark.parametrize(
    ("error", "status", "error_type", "code"),
    [
        (InvalidRequest("m", "n"), 400, "invalid_request_error", "invalid_value"),
        (InvalidRequest("m", "n", "unknown_parameter"), 400, "invalid_request_error", "unknown_parameter"),
        (ContextLengthExceeded("m", "messages"), 400, "invalid_request_error", "context_length_exceeded"),
        (ModelNotFound("m", "model"), 404, "invalid_request_error", "model_not_found"),
        (UnsupportedMediaType("m"), 415, "invalid_request_error", "unsupported_media_type"),
        (Overloaded("m", 3), 503, "service_unavailable_error", "overloaded"),
        (RateLimited("m", "tokens_per_minute", 3), 429, "rate_limit_error", "rate_limited"),
        (NoNode("m"), 503, "service_unavailable_error", "no_node"),
        (RequestFailed("m", "transfer_failed"), 502, "server_error", "request_failed"),
        (DeadlineExceeded("m"), 504, "server_error", "deadline_exceeded"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_status_and_envelope(error: BatonError, status: int, error_type: str, code: str) -> None:
    param = error.param if isinstance(error, InvalidRequest) else None
    assert status_of(error) == status
    assert error_body(error) == {"error": {"message": "m", "type": error_type, "param": param, "code": code}}


@pytest.mark.parametrize(
    "error", [MemoryError(), OSError(errno.EMFILE, "/srv/key"), OSError(errno.ENOMEM, "x"), BlockingIOError(11, "fork")]
)
def test_what_the_system_refuses_is_answered_like_a_full_queue(error: Exception) -> None:
    assert (status_of(error), retry_after(error)) == (503, "1")
    assert error_body(error)["error"]["code"] == "overloaded"
    assert "/srv" not in str(error_body(error))


def test_a_router_without_another_thread_says_when_to_come_back() -> None:
    no_thread = mock.patch("threading._start_new_thread", side_effect=RuntimeError("can't start new thread"))
    with no_thread, pytest.raises(RuntimeError) as refused:
        ThreadPoolExecutor(1).submit(int)
    assert (status_of(refused.value), retry_after(refused.value)) == (503, "1")
    assert status_of(RuntimeError("something else")) == 500


@pytest.mark.parametrize(
    "error", [ValueError("/srv/key"), InvalidMessage("/srv/key"), TransferFailed("/srv/key"), BatonError("/srv/key")]
)
def test_our_own_mistakes_are_a_500_without_details(error: Exception) -> None:
    assert status_of(error) == 500
    assert "/srv/key" not in str(error_body(error))
    assert error_body(error)["error"]["code"] == "internal_error"


def test_a_class_that_is_not_in_the_table_is_answered_like_its_parent() -> None:
    class QueueFull(Overloaded):
        code = "queue_full"

    assert status_of(QueueFull("m")) == 503
    assert error_body(QueueFull("m"))["error"]["code"] == "queue_full"


def test_only_errors_that_pass_tell_when_to_come_back() -> None:
    assert retry_after(Overloaded("m", 7)) == "7"
    assert retry_after(NoNode("m", 0)) == "1"
    assert retry_after(RequestFailed("m")) is None


@pytest.mark.parametrize(
    ("status", "error_type", "code"),
    [
        (401, "invalid_request_error", "invalid_api_key"),
        (404, "invalid_request_error", "not_found"),
        (413, "invalid_request_error", "request_too_large"),
        (429, "rate_limit_error", "rate_limited"),
        (418, "invalid_request_error", "bad_request"),
        (500, "server_error", "internal_error"),
    ],
)
def test_errors_of_http_itself_have_the_same_envelope(status: int, error_type: str, code: str) -> None:
    error = http_layer_body(status)["error"]
    assert (error["type"], error["code"], error["param"]) == (error_type, code, None)
    assert error["message"]
