"""Errors as clients see them: the one table from error classes to HTTP, and the one envelope.

Every answer that is not a success has the body `{"error": {"message", "type", "param", "code"}}`. The codes come from
`baton.wire.errors` and never change. Invariant: an error that is not the client's mistake shows no internal detail,
because its message may name addresses, files or other requests.

What the system has refused (memory, a thread, a descriptor) is no failure of this program: it is answered like a full
queue, since there may be room again.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import Any

from baton.wire.errors import (
    BatonError,
    ChildFailed,
    ContextLengthExceeded,
    ConversationNotFound,
    DeadlineExceeded,
    InvalidMessage,
    InvalidRequest,
    InvalidSetting,
    ModelLoadError,
    ModelNotFound,
    NoNode,
    Overloaded,
    RateLimited,
    Refused,
    RequestFailed,
    ResponseNotFound,
    StreamNotFound,
    TransferFailed,
    UnsupportedMediaType,
)

INVALID, RATE_LIMITED = "invalid_request_error", "rate_limit_error"
UNAVAILABLE, SERVER = "service_unavailable_error", "server_error"


@dataclass(frozen=True, slots=True)
class HttpError:
    """The HTTP answer to one class of errors. `shows_message`: whether clients may see the error's own message."""

    status: int
    type: str
    shows_message: bool = True


_INTERNAL = HttpError(500, SERVER, shows_message=False)

HTTP_OF: dict[type[BatonError], HttpError] = {
    BatonError: _INTERNAL,
    InvalidRequest: HttpError(400, INVALID),
    ContextLengthExceeded: HttpError(400, INVALID),
    ConversationNotFound: HttpError(404, INVALID),
    ModelNotFound: HttpError(404, INVALID),
    ResponseNotFound: HttpError(404, INVALID),
    StreamNotFound: HttpError(404, INVALID),
    UnsupportedMediaType: HttpError(415, INVALID),
    Overloaded: HttpError(503, UNAVAILABLE),
    RateLimited: HttpError(429, RATE_LIMITED),
    NoNode: HttpError(503, UNAVAILABLE),
    RequestFailed: HttpError(502, SERVER),
    DeadlineExceeded: HttpError(504, SERVER),
    Refused: _INTERNAL,
    InvalidMessage: _INTERNAL,
    TransferFailed: _INTERNAL,
    InvalidSetting: _INTERNAL,
    ModelLoadError: _INTERNAL,
    ChildFailed: _INTERNAL,
}

# errors of the HTTP layer, for which Baton has no exception of its own: status -> (type, code, message)
_HTTP_LAYER: dict[int, tuple[str, str, str]] = {
    400: (INVALID, "bad_request", "the request is not valid HTTP"),
    401: (INVALID, "invalid_api_key", "the API key is missing or wrong: send 'Authorization: Bearer KEY'"),
    403: (INVALID, "forbidden", "this API key may not do this"),
    404: (INVALID, "not_found", "there is nothing at this path"),
    405: (INVALID, "method_not_allowed", "this path does not take this method"),
    408: (INVALID, "request_timeout", "the request took too long to arrive"),
    411: (INVALID, "length_required", "the request needs a body of known length"),
    413: (INVALID, "request_too_large", "the request body is too large"),
    414: (INVALID, "uri_too_long", "the URL is too long"),
    415: (INVALID, "unsupported_media_type", "the content type or encoding is not supported"),
    417: (INVALID, "expectation_failed", "the Expect header cannot be met"),
    429: (RATE_LIMITED, "rate_limited", "too many requests with this API key: try again later"),
    431: (INVALID, "headers_too_large", "the request's headers are too many or too large"),
    503: (UNAVAILABLE, "overloaded", "the server cannot take this request now: try again later"),
}

_NO_THREAD = "can't start new thread"  # CPython has no class for it
_NO_ROOM = (errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE)


def status_of(error: Exception) -> int:
    """The HTTP status that answers `error`; 500 for what Baton did not raise on purpose."""
    return _http_of(error).status


def error_body(error: Exception) -> dict[str, Any]:
    """The envelope that answers `error`."""
    error = _known(error)
    http = _http_of(error)
    if not isinstance(error, BatonError) or not http.shows_message:
        return envelope("the server failed to handle this request", SERVER, None, BatonError.code)
    param = error.param if isinstance(error, InvalidRequest) else None
    return envelope(error.message, http.type, param, error.code)


def retry_after(error: Exception) -> str | None:
    """The value of the Retry-After header in seconds, None when the answer carries none."""
    error = _known(error)
    return str(max(1, error.retry_after_s)) if isinstance(error, Overloaded) else None


def http_layer_body(status: int) -> dict[str, Any]:
    """The envelope for an error that HTTP itself raises (no route, body too large, ...), by its status."""
    fallback = (INVALID, "bad_request", "the request cannot be served") if 400 <= status < 500 else None
    error_type, code, message = (
        _HTTP_LAYER.get(status) or fallback or (SERVER, BatonError.code, "the server failed to handle this request")
    )
    return envelope(message, error_type, None, code)


def envelope(message: str, error_type: str, param: str | None, code: str | None) -> dict[str, Any]:
    """The body of every error."""
    return {"error": {"message": message, "type": error_type, "param": param, "code": code}}


def _known(error: Exception) -> Exception:
    """`Overloaded` for what the system has refused; any other error as it is."""
    is_refused = isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and str(error) == _NO_THREAD)
    if is_refused or (isinstance(error, OSError) and error.errno in _NO_ROOM):
        return Overloaded("the server has no memory, thread or file left for this request now: try again later")
    return error


def _http_of(error: Exception) -> HttpError:
    # the nearest ancestor in the table, so that a class which is not listed is answered like its parent
    return next((HTTP_OF[kind] for kind in type(_known(error)).__mro__ if kind in HTTP_OF), _INTERNAL)
