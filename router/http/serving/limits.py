"""What the HTTP server accepts, and how long it waits: the one place for its limits and deadlines.

Pure data. docs/operations/limits.md has the same table for people.
"""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import web

MAX_JSON_TEXTS = 2**16
"""Names of members, strings, lists and objects that one body may hold together. 2,048 messages, of
which every second has a tool call and the others its result, hold two fifths."""

MAX_JSON_VALUES = 2**20 + MAX_JSON_TEXTS
"""Values that one body may hold: a prompt of the most token ids that are allowed, and all else."""


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits of connections, of what comes in on them, and deadlines in seconds.

    `header_s`: from the first byte of a request (on a new connection: from its beginning) to the end of its headers.
    `body_stall_s`, `body_s`: how long a body may bring nothing, and how long it may take in all. `write_s`: how long a
    client may take nothing of what is written to it. `idle_s`: how long a connection waits for its next request.
    `max_held_bytes`: of all bodies that are being read or wait to be parsed. `max_held_bytes_per_client`: of those that
    came with one key or, without keys, from one address. `parse_wait_s`: how long a large body waits to be parsed.
    `linger_s`: how long a refused body is read and thrown away, so that the client gets to see the answer.
    """

    max_body_bytes: int = 8 * 2**20
    max_held_bytes: int = 512 * 2**20
    max_held_bytes_per_client: int = 128 * 2**20
    max_url_bytes: int = 8192
    max_header_bytes: int = 8190
    max_headers: int = 128
    max_connections: int = 8192
    max_connections_per_address: int = 1024
    header_s: float = 10.0
    body_stall_s: float = 10.0
    body_s: float = 30.0
    parse_wait_s: float = 30.0
    write_s: float = 30.0
    idle_s: float = 75.0
    linger_s: float = 2.0


HTTP_LIMITS = web.AppKey("http_limits", HttpLimits)
"""Where an application keeps its limits."""


def limits_of(request: web.Request) -> HttpLimits:
    """The limits of the application that handles `request`."""
    return request.app.get(HTTP_LIMITS, HttpLimits())
