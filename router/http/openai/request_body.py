"""The body of an HTTP request -> a validated request of one of the schemas.

Owns the content type, and how errors of validation are told to clients. Does not know the fields. Invariant: a large
body is never parsed by the event loop.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from baton.router.http.openai import ignored
from baton.router.http.openai.fields import FIELD_ERROR
from baton.router.http.openai.strict_json import member_path, parse_object, shown
from baton.router.http.serving.bodies import BODIES, Place
from baton.router.http.serving.body_reader import read_body
from baton.wire.errors import InvalidRequest, UnsupportedMediaType

BodySource = Callable[[web.Request, Place], Awaitable[tuple[bytes, str | None]]]
"""Gives the body of a request and its content type."""
_Request = TypeVar("_Request", bound=BaseModel)


def parse_body(
    body: bytes, content_type: str | None, schema: type[_Request], notes: ignored.IgnoredFields | None = None
) -> _Request:
    """The request in an HTTP body. What it carries that changes nothing is noted in `notes`.

    Raises `UnsupportedMediaType` for anything but JSON in UTF-8, `InvalidRequest` for whatever else is wrong, and no
    other error, whatever the bytes are. Ranges of sampling parameters are checked by `decoding_params()`.
    """
    _check_content_type(content_type)
    try:
        return schema.model_validate(parse_object(body), context=notes)
    except ValidationError as error:
        raise _invalid_request(error.errors(include_url=False, include_input=False)[0]) from None


async def sent_body(http: web.Request, place: Place) -> tuple[bytes, str | None]:
    """The body that came with a request. Raises as `read_body`."""
    return await read_body(http, place), http.headers.get("Content-Type")


async def read_request(
    http: web.Request,
    schema: type[_Request],
    notes: ignored.IgnoredFields | None = None,
    source: BodySource = sent_body,
) -> _Request:
    """The request in the body of `http`. Raises as `source`, `parse_body` and `Bodies.parse`."""
    bodies = http.app[BODIES]
    with bodies.place(http) as place:
        body, content_type = await source(http, place)
        return await bodies.parse(place, partial(parse_body, body, content_type, schema, notes))


def _check_content_type(content_type: str | None) -> None:
    if content_type is None:
        raise UnsupportedMediaType("the Content-Type header is missing: send application/json")
    media_type, *parameters = (part.strip().lower() for part in content_type.split(";"))
    if media_type != "application/json":
        raise UnsupportedMediaType(f"content type {shown(media_type)} is not supported: send application/json")
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "charset" and value.strip().strip('"') not in ("utf-8", "utf8"):
            raise UnsupportedMediaType(f"charset {shown(value)} is not supported: send utf-8")


def _invalid_request(details: ErrorDetails) -> InvalidRequest:
    """Turns pydantic's first error into an `InvalidRequest` with the client's spelling of the field."""
    context: dict[str, Any] = details.get("ctx", {})
    param = ""
    for part in (*details["loc"], *context.get("path", ())):
        param = f"{param}[{part}]" if isinstance(part, int) else member_path(param, part)
    message = "is required" if details["type"] == "missing" else details["msg"]
    separator = " " if details["type"] in ("missing", FIELD_ERROR) else ": "
    return InvalidRequest(f"{param or 'the request'}{separator}{message}", param or None, context.get("code"))
