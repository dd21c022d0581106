"""Serves every path also with one slash at its end, as clients whose base URL ends with a slash send it.

There is no redirect, because a client may drop the body of a POST when it follows one. Paths are not rewritten either:
each alias is a route of its own with the same handler, so `//v1` and `/v1//chat` stay unknown.
"""

from __future__ import annotations

from aiohttp import web


def serve_trailing_slashes(app: web.Application) -> None:
    """Add the aliases. Call it when all routes are there."""
    for route in list(app.router.routes()):
        path = route.resource.canonical if isinstance(route.resource, web.PlainResource) else "/"
        if not path.endswith("/"):
            app.router.add_route(route.method, f"{path}/", route.handler)
