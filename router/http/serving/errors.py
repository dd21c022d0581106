"""Errors that HTTP itself makes, as answers in the one envelope.

Owns which status belongs to what aiohttp's parser refuses. An answer shows nothing of what the client sent, and ends
the connection: after a request that cannot be parsed nobody knows where the next one begins.
"""

from __future__ import annotations

import secrets
from http import HTTPStatus

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMethod, ContentEncodingError, HttpProcessingError, LineTooLong

from baton.router.http.openai.errors import http_layer_body
from baton.router.http.serving.json_pieces import dumps

REQUEST_ID_HEADER = "x-request-id"
_METHODS = "GET, HEAD, POST"
_TARGET_BEGINNINGS = ("/", "http:", "https:")


def error_answer(status: int) -> web.Response:
    """The answer to a request that no handler has seen. It ends the connection."""
    response = web.Response(
        status=status, body=dumps(http_layer_body(status)).encode(), content_type="application/json"
    )
    response.headers[REQUEST_ID_HEADER] = secrets.token_hex(16)
    if status == 405:
        response.headers["Allow"] = _METHODS
    response.force_close()
    return response


def raw_answer(status: int, message: str = "") -> bytes:
    """A whole answer as bytes, for a connection on which no request is read; `message` instead of the usual one."""
    payload = http_layer_body(status)
    if message:
        payload["error"]["message"] = message
    body = dumps(payload).encode()
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\nConnection: close\r\n"
        f"{REQUEST_ID_HEADER}: {secrets.token_hex(16)}\r\nContent-Length: {len(body)}\r\n"
    )
    retry = "Retry-After: 1\r\n" if status == 429 else ""
    return f"{head}{retry}\r\n".encode() + body


def parser_status(error: BaseException | None, max_url_bytes: int) -> int:
    """The status for what aiohttp's parser, in C or in Python, raised. `max_url_bytes` has to differ from the limit of
    a header, because it is the only thing that tells an overlong URL from an overlong header."""
    if isinstance(error, LineTooLong):
        return 414 if _is_request_line(error, max_url_bytes) else 431
    if isinstance(error, ContentEncodingError):
        return 415
    if isinstance(error, BadHttpMethod):
        return 400 if "HTTPS" in error.message else 405
    if isinstance(error, HttpProcessingError) and error.message.startswith("Too many headers"):
        return 431
    return 400


def _is_request_line(error: LineTooLong, max_url_bytes: int) -> bool:
    line, limit, *_ = error.args
    text = line.decode("latin-1") if isinstance(line, bytes) else str(line)
    # the parser in Python holds a header that is not complete yet against the limit of the first line
    return limit == max_url_bytes and (text.startswith(_TARGET_BEGINNINGS) or ":" not in text.split(" ")[0])
