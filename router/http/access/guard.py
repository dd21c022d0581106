"""The guard at the door of the HTTP application: no route without a key but those that say whether the router lives,
and the static files of the page.

Owns which keys are valid, the account of each, and who a request came from. Once there is a guard, every route is
denied by default, and so is every path that is no route; `OPEN_ROUTES` are named by the route that aiohttp has matched,
never by the text of a URL. Who a request came from is at `http.get(IDENTITY)`.

Requests per minute and requests at once are counted here, for every POST and for `COUNTED_ROUTES`, before a body is
read. Tokens are charged where they are known (`router/http/admission`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

from aiohttp import web

from baton.router.http.access.account import Account
from baton.router.http.access.identity import Identity, cache_root_of
from baton.router.http.access.keys import KEY_VARIABLE, ApiKey, KeyTable, digest_of, read_key_file
from baton.wire.errors import InvalidSetting, RateLimited
from baton.wire.links import is_loopback

IDENTITY: Final = web.RequestKey("identity", Identity)
LIFE_ROUTES = frozenset({"/health", "/live", "/ready"})
PAGE_FILES = frozenset({"/", "/page/files/{name}"})
"""The same bytes for every deployment: the page asks for a key by itself."""
RESUME_ROUTE = "/v1/streams/{event_id}"
RESPONSE_ROUTE = "/v1/responses/{response_id}"
ITEMS_ROUTE = RESPONSE_ROUTE + "/input_items"
CONVERSATION_ROUTE = "/v1/conversations/{conversation_id}"
CONVERSATION_ITEMS_ROUTE = CONVERSATION_ROUTE + "/items"
CONVERSATION_ITEM_ROUTE = CONVERSATION_ITEMS_ROUTE + "/{item_id}"
COUNTED_ROUTES = frozenset({
    RESUME_ROUTE, RESPONSE_ROUTE, ITEMS_ROUTE, CONVERSATION_ROUTE, CONVERSATION_ITEMS_ROUTE, CONVERSATION_ITEM_ROUTE,
})  # fmt: skip
"""Generate, read or write as a POST does, and count as one whatever the method is."""
OPEN_ROUTES = LIFE_ROUTES | PAGE_FILES
NAME_OF_VARIABLE = "environment"
INVALID_KEY = "invalid_api_key"
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_log = logging.getLogger(__name__)


class Guard:
    """Lets requests with a valid key through. `secret` makes the salts of the prefix cache: it has to stay the same for
    nodes to find again what they have cached."""

    def __init__(self, path: Path | None, key: str, secret: bytes) -> None:
        """`path` is the key file, `key` a single key beside it ("": none). Raises `InvalidSetting`."""
        self.rejected: Counter[str] = Counter()
        """Requests that were turned away, by reason."""
        self._path = path
        self._key = key
        self._secret = secret
        self._identities: dict[str, Identity] = {}
        self._table = self._read()
        self._make_identities(self._table)

    @property
    def identities(self) -> Sequence[Identity]:
        """The identities of all valid keys."""
        return tuple(self._identities.values())

    def reload(self) -> None:
        """Read the key file again. One that cannot be used is logged, and the keys stay as they were."""
        try:
            table = self._read()
        except InvalidSetting as error:
            _log.error("the API keys stay as they were: %s", error)
            return
        self._make_identities(table)
        self._table = table
        _log.info("%d API keys are valid now", len(table.keys))

    def protect(self, app: web.Application) -> None:
        """Deny every route of `app` without a key, and add the headers that tell a client about its limits. To be
        called when all other middlewares are in place: those outside of the guard make errors readable."""
        app.middlewares.append(self._admit)
        app.on_response_prepare.append(_add_headers)

    def identify(self, headers: Sequence[str]) -> Identity | None:
        """The identity of the key in these `Authorization` headers, None unless there is exactly one with a valid
        key."""
        scheme, _, key = headers[0].partition(" ") if len(headers) == 1 else ("", "", "")
        name = self._table.name_of(key.strip(" "))
        return self._identities[name] if name is not None and scheme.lower() == "bearer" else None

    @web.middleware
    async def _admit(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        if _is_open(request):
            return await handler(request)
        identity = self.identify(_authorizations(request))
        if identity is None:
            self.rejected[INVALID_KEY] += 1
            raise web.HTTPUnauthorized
        request[IDENTITY] = identity
        if request.method != "POST" and _route(request) not in COUNTED_ROUTES:
            return await handler(request)
        try:
            identity.account.begin()
        except RateLimited as error:
            self.rejected[error.limit] += 1
            raise
        try:
            return await handler(request)
        finally:
            identity.account.end()

    def _read(self) -> KeyTable:
        keys = {} if self._path is None else read_key_file(self._path)
        if self._key:
            if NAME_OF_VARIABLE in keys:
                raise InvalidSetting(f"key file {self._path}: {NAME_OF_VARIABLE!r} is the name of ${KEY_VARIABLE}")
            keys[NAME_OF_VARIABLE] = ApiKey(digest_of(self._key).hex(), operator=True)
        return KeyTable(keys)

    def _make_identities(self, table: KeyTable) -> None:
        known = self._identities
        self._identities = {}
        for name, key in table.keys.items():
            account = known[name].account if name in known else Account(key)
            account.change_limits(key)
            self._identities[name] = Identity(name, cache_root_of(self._secret, name, key.group), account, key.operator)


def require_keys_beyond_loopback(host: str, has_keys: bool, allows_anyone: bool) -> None:
    """Raise `InvalidSetting` when anyone on a network could use the router and nobody has said that this is wanted."""
    if not has_keys and not allows_anyone and not is_loopback(host):
        raise InvalidSetting(
            f"--host {host} opens the router to the network; make a key with `baton keys new NAME` and start the "
            "router with --api-key-file FILE, or allow requests without a key with --allow-unauthenticated"
        )


def _route(request: web.Request) -> str | None:
    resource = request.match_info.route.resource
    return None if resource is None else resource.canonical


def _is_open(request: web.Request) -> bool:
    return _route(request) in OPEN_ROUTES and request.method in ("GET", "HEAD")


def _authorizations(request: web.Request) -> Sequence[str]:
    """The `Authorization` headers; without any, the keys that Anthropic's clients send as `x-api-key`."""
    keys = request.headers.getall("x-api-key", ())
    return request.headers.getall("Authorization", ()) or [f"Bearer {key}" for key in keys]


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Here and not in the middleware, because a stream sends its headers before the middleware sees the response."""
    identity = request.get(IDENTITY)
    if identity is not None:
        response.headers.update(identity.account.headers())
    elif response.status == web.HTTPUnauthorized.status_code:
        response.headers["WWW-Authenticate"] = "Bearer"
