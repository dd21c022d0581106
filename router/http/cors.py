"""Cross-origin requests: whether a browser's script from another site may use this router.

Off while no origin is allowed. Owns the answers to preflight requests, which need no route and no key because they ask
for nothing else, and the headers that let a script read an answer. Does not protect anything by itself: only browsers
ask for it.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from aiohttp import hdrs, web
from aiohttp.typedefs import Middleware

from baton.wire.errors import InvalidSetting

ANY = "*"
_METHODS = ("GET", "HEAD", "POST", "OPTIONS")
_EXPOSED_HEADERS = "x-request-id, retry-after"
_MAX_AGE_S = "600"
_NAMES = re.compile(r"[A-Za-z0-9_-]{1,64}(, ?[A-Za-z0-9_-]{1,64}){0,31}", re.ASCII)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class CorsPolicy:
    """What scripts of other origins may do. `ANY` among the values allows all of them; no origin means off."""

    origins: tuple[str, ...] = ()
    methods: tuple[str, ...] = (ANY,)
    headers: tuple[str, ...] = (ANY,)
    allows_credentials: bool = False

    def __post_init__(self) -> None:
        for origin in self.origins:
            parts = urlsplit(origin)
            if origin != ANY and (not parts.scheme or not parts.netloc or f"{parts.scheme}://{parts.netloc}" != origin):
                raise InvalidSetting(f"--allowed-origins: {origin!r:.100} is neither * nor like https://example.org")
        if self.allows_credentials and ANY in self.origins:
            raise InvalidSetting("--allow-credentials: name the allowed origins; * would let every site use them")

    def install(self, app: web.Application) -> None:
        """Answer preflights and mark answers in `app`. Does nothing while no origin is allowed."""
        if self.origins:
            app.middlewares.insert(0, self._middleware())
            app.on_response_prepare.append(self._mark)

    def _allows(self, origin: str) -> bool:
        return ANY in self.origins or origin in self.origins

    def _middleware(self) -> Middleware:
        @web.middleware
        async def answer_preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
            is_preflight = request.method == hdrs.METH_OPTIONS and hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers
            if not is_preflight or hdrs.ORIGIN not in request.headers:
                return await handler(request)
            return web.Response(status=204, headers=self._preflight_headers(request))

        return answer_preflight

    def _preflight_headers(self, http: web.Request) -> dict[str, str]:
        """Headers of a preflight's answer; none for an origin that is not allowed. The client's words come back only
        where everything is allowed, and only as a list of tokens."""
        if not self._allows(http.headers[hdrs.ORIGIN]):
            return {}
        wanted = http.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "")
        headers = ", ".join(self.headers)
        if ANY in self.headers:  # a literal * would not cover Authorization
            headers = wanted if _NAMES.fullmatch(wanted) else ""
        return {
            hdrs.ACCESS_CONTROL_ALLOW_METHODS: ", ".join(_METHODS if ANY in self.methods else self.methods),
            hdrs.ACCESS_CONTROL_MAX_AGE: _MAX_AGE_S,
            **({hdrs.ACCESS_CONTROL_ALLOW_HEADERS: headers} if headers else {}),
        }

    async def _mark(self, http: web.Request, response: web.StreamResponse) -> None:
        origin = http.headers.get(hdrs.ORIGIN)
        if ANY not in self.origins:
            response.headers.add(hdrs.VARY, hdrs.ORIGIN)
        if origin is None or not self._allows(origin):
            return
        response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = ANY if ANY in self.origins else origin
        response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = _EXPOSED_HEADERS
        if self.allows_credentials:
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_CREDENTIALS] = "true"
