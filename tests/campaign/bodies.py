"""Random bodies for every route of the router, drawn from a seed: what no client library would send.

A body is a good one that was changed, or none at all: nested very deep, with very many members, with members of other
types, not UTF-8, cut short, compressed, in odd chunks, slow, or larger than is allowed. Owns the bytes, and whether
an answer is owed to them.
"""

from __future__ import annotations

import gzip
import json
import math
import random
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from baton.router.http.docs.routes import ROUTES
from tests.campaign.requests import CHAT, COMPLETIONS, RESPONSES, Body, Request, make_request
from tests.system.harness import MODEL_NAME

MAX_BODY_BYTES = 8 * 2**20
_MAX_MEMBERS = 2_000_000
_MAX_TOKENS = 4
_NAMES_LENGTH = ("max_tokens", "max_output_tokens")
"""Stay as they are: an answer of thousands of tokens is work, and no fault."""
_PATHS = {COMPLETIONS: "/v1/completions", CHAT: "/v1/chat/completions", RESPONSES: "/v1/responses"}
_TALK = [{"role": "user", "content": "where?"}]
_OTHERS: Mapping[str, Body] = {
    "/v1/messages": {"model": MODEL_NAME, "max_tokens": _MAX_TOKENS, "messages": _TALK, "system": "river"},
    "/v1/messages/count_tokens": {"model": MODEL_NAME, "messages": _TALK},
    "/tokenize": {"model": MODEL_NAME, "prompt": "the river", "add_special_tokens": True},
    "/detokenize": {"model": MODEL_NAME, "tokens": [70, 71, 72]},
    "/admin/drain": {"node": "nobody", "restart": False},
    "/admin/prefer": {"node": "nobody", "legs": ["prefill"]},
}
_ODD: tuple[Any, ...] = (None, True, -1, 2**63, 1e308, "", "\0", "\ud800", "x" * 70_000, [], {}, [[[]]], {"": None})


@dataclass(frozen=True, slots=True)
class Sent:
    """A request as bytes on a connection: its head, and pieces of its body, with `pause_s` before each. An answer is
    owed unless the bytes are no whole request."""

    kind: str
    target: str
    head: bytes
    pieces: tuple[bytes, ...]
    pause_s: float = 0.0
    is_owed_an_answer: bool = True

    def __str__(self) -> str:
        return f"{self.target} with a body of {sum(map(len, self.pieces))} bytes ({self.kind})"


def make_sent(rng: random.Random, *, sees: bool) -> Sent:
    """Any of these, to any route."""
    method, path = rng.choice(list(ROUTES))
    if rng.random() < 0.6:
        method, path = "POST", rng.choice([*_PATHS.values(), *_OTHERS])
    path = path.replace("{event_id}", f"{rng.randrange(2**40):x}.1").replace("{name}", rng.choice((MODEL_NAME, "x")))
    kind = rng.choice(list(_CONTENTS))
    body = _CONTENTS[kind](rng, _good_body(rng, path, sees=sees))
    return _delivered(rng, kind, f"{method} {path}", body)


def _good_body(rng: random.Random, path: str, *, sees: bool) -> Body:
    """One that belongs to this route, or to another where it takes none."""
    if path in _OTHERS:
        return dict(_OTHERS[path])
    request = make_request(rng, 2 * _MAX_TOKENS, 0.1, sees=sees)
    while path in _PATHS.values() and _PATHS[request.api] != path:
        request = make_request(rng, 2 * _MAX_TOKENS, 0.1, sees=sees)
    return _body_of(request) | {"stream": rng.random() < 0.5}


def _body_of(request: Request) -> Body:
    body: Body = request.body | request.body["extra_body"]
    del body["extra_body"]
    return body | {name: _MAX_TOKENS for name in _NAMES_LENGTH if name in body}


def _types(rng: random.Random, body: Body) -> bytes:
    """Some values are others, some members are new."""
    for _ in range(rng.randint(1, 3)):
        name = rng.choice([*(each for each in body if each not in _NAMES_LENGTH), "x"])
        body[name] = _changed(rng, body.get(name))
    return json.dumps(body).encode()


def _changed(rng: random.Random, value: Any) -> Any:
    """`value`, or something in it, is something else."""
    if isinstance(value, dict) and value and rng.random() < 0.7:
        name = rng.choice(list(value))
        return {**value, name: _changed(rng, value[name])}
    if isinstance(value, list) and value and rng.random() < 0.7:
        place = rng.randrange(len(value))
        return [*value[:place], _changed(rng, value[place]), *value[place + 1 :]]
    return rng.choice(_ODD)


def _deep(rng: random.Random, body: Body) -> bytes:
    """A member, or all of it, is nested very deep, and mostly closed again."""
    depth = _number(rng, MAX_BODY_BYTES // 8)
    opening, closing = rng.choice(((b"[", b"]"), (b'{"a":', b"}")))
    nest = opening * depth + b"1" + closing * (depth if rng.random() < 0.7 else 0)
    return nest if rng.random() < 0.3 else _with_member(rng, body, nest)


def _many(rng: random.Random, body: Body) -> bytes:
    """A member has very many members or items."""
    number, item = _number(rng, _MAX_MEMBERS), rng.choice((b"0", b"null", b'""', b"[]", b"{}", b"1.5e300"))
    if rng.random() < 0.5:
        return _with_member(rng, body, b"[%b]" % b",".join([item] * number))
    return _with_member(rng, body, b"{%b}" % b",".join(b'"k%d":%b' % (place, item) for place in range(number)))


def _with_member(rng: random.Random, body: Body, value: bytes) -> bytes:
    name = rng.choice([*body, "x"])
    return json.dumps(body | {name: "VALUE"}).encode().replace(b'"VALUE"', value)


def _long(rng: random.Random, body: Body) -> bytes:
    """A text is very long, up to more than a body may be."""
    text = rng.choice(("a", "the river ", "\u20ac")) * _number(rng, MAX_BODY_BYTES // 8)
    return json.dumps(body | {rng.choice([*body, "x"]): text}, ensure_ascii=rng.random() < 0.5).encode()


def _broken(rng: random.Random, body: Body) -> bytes:
    """Some bytes are others: no UTF-8, or no JSON."""
    data = bytearray(json.dumps(body).encode())
    for _ in range(rng.randint(1, 5)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def _noise(rng: random.Random, body: Body) -> bytes:
    return rng.randbytes(_number(rng, MAX_BODY_BYTES + 2**16))


def _truncated(rng: random.Random, body: Body) -> bytes:
    data = json.dumps(body).encode()
    return data[: rng.randrange(len(data))]


_CONTENTS: Mapping[str, Callable[[random.Random, Body], bytes]] = {
    "types": _types,
    "deep": _deep,
    "many": _many,
    "long": _long,
    "broken": _broken,
    "noise": _noise,
    "truncated": _truncated,
}


_COMPRESS: Mapping[str, Callable[[bytes], bytes]] = {
    "gzip": lambda body: gzip.compress(body, 1, mtime=0),
    "deflate": lambda body: zlib.compress(body, 1),
    "no gzip": lambda body: body,
}


def _number(rng: random.Random, most: int) -> int:
    """From 1 on, each size as often."""
    return round(math.exp(math.log(most) * rng.random()))


def _delivered(rng: random.Random, kind: str, target: str, body: bytes) -> Sent:
    """As a whole, in chunks, compressed, slowly, or not to its end."""
    how = rng.choice(("whole", "whole", "chunked", "gzip", "deflate", "no gzip", "slow", "hung up", "no chunks"))
    if how in _COMPRESS:
        body = _COMPRESS[how](body)
    if how in ("chunked", "no chunks"):
        framing = "Transfer-Encoding: chunked"
        chunks = [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in _cut(rng, body)]
        pieces = (*chunks, b"0\r\n\r\n" if how == "chunked" else b"zz\r\n")
    else:
        framing = f"Content-Length: {len(body) + 7 * (how == 'hung up')}"
        pieces = _cut(rng, body) if how == "slow" else (body,)
    encoding = [f"Content-Encoding: {how.removeprefix('no ')}"] * (how in _COMPRESS)
    lines = [f"{target} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json", "Connection: close"]
    head = "".join(f"{line}\r\n" for line in [*lines, framing, *encoding, ""]).encode()
    is_whole = how not in ("hung up", "no chunks")
    return Sent(f"{kind}, {how}", target, head, pieces, 0.3 if how == "slow" else 0.0, is_whole)


def _cut(rng: random.Random, body: bytes) -> tuple[bytes, ...]:
    """Up to eight pieces, none of them empty."""
    places = sorted({0, len(body), *(rng.randrange(len(body) + 1) for _ in range(7))})
    return tuple(body[begin:end] for begin, end in pairwise(places))
