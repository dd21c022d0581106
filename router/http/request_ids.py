"""The id of an HTTP request: the client's own `X-Request-Id` where it is sane, otherwise a random one.

Owns the rule for sane ids, and where a request carries its id. Ids are labels: they are echoed, logged and looked up,
and never reach a node. Two requests may have the same id, because requests in flight are told apart by their handoff
ids, which the router makes itself.
"""

from __future__ import annotations

import re
import secrets

from aiohttp import web

HEADER = "X-Request-Id"
REQUEST_ID = web.RequestKey("request_id", str)
_SANE = re.compile(r"[A-Za-z0-9._-]{1,128}", re.ASCII)


def choose_request_id(http: web.Request) -> str:
    """The id that this request has from now on. An id with other characters, or a second one, is not used."""
    given = http.headers.getall(HEADER, ())
    return given[0] if len(given) == 1 and _SANE.fullmatch(given[0]) else secrets.token_hex(16)
