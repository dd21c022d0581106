"""Adds /openapi.json and /docs to an application."""

from __future__ import annotations

import asyncio
from functools import cache

from aiohttp import web

from baton.router.http.docs.openapi import openapi_document
from baton.router.http.docs.page import CONTENT_POLICY, docs_page
from baton.router.http.openai.replies import json_bytes


def add_docs(app: web.Application, root_path: str = "") -> None:
    """Serve what the application's routes are, these two included. The first request for it makes the document, in
    a thread: on the event loop it would hold up all streams. `root_path`: where a proxy has this server."""

    @cache
    def document() -> dict[str, object]:
        return openapi_document(app.router.routes(), root_path=root_path)

    async def openapi(http: web.Request) -> web.Response:
        body = await asyncio.to_thread(lambda: json_bytes(document()))
        return web.Response(body=body, content_type="application/json")

    async def page(http: web.Request) -> web.Response:
        headers = {"Content-Security-Policy": CONTENT_POLICY}
        link = "../openapi.json" if http.path.endswith("/") else "openapi.json"
        text = await asyncio.to_thread(lambda: docs_page(document(), link))
        return web.Response(text=text, content_type="text/html", headers=headers)

    app.router.add_get("/openapi.json", openapi)
    app.router.add_get("/docs", page)
