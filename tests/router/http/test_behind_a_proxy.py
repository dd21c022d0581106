"""A router that a proxy has under a path of its own: what a browser and a program ask for there."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import replace
from urllib.parse import urljoin

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from baton.router.http.openai.prompts import PromptMaker
from tests.router.http_client import fetch
from tests.router.rig import ROUTER_SETTINGS, Server, serving

PREFIX = "/baton"


@pytest.fixture
async def server(prompts: PromptMaker) -> AsyncIterator[Server]:
    async with serving(prompts, router_settings=replace(ROUTER_SETTINGS, root_path=PREFIX)) as running:
        yield running


@pytest.fixture
async def proxy(server: Server) -> AsyncIterator[str]:
    """The address of the router at a proxy that takes the prefix off."""

    async def forward(request: web.Request) -> web.Response:
        url = f"http://{server.host}:{server.port}/{request.match_info['path']}"
        async with ClientSession() as session, session.request(request.method, url, data=await request.read()) as reply:
            return web.Response(status=reply.status, body=await reply.read(), content_type=reply.content_type)

    app = web.Application()
    app.router.add_route("*", PREFIX + "/{path:.*}", forward)
    async with TestServer(app) as running:
        yield str(running.make_url(f"{PREFIX}/"))


async def loaded(session: ClientSession, url: str) -> str:
    async with session.get(url) as reply:
        assert reply.status == 200, url
        return await reply.text()


async def test_all_that_the_page_loads_and_asks_for_is_under_its_own_path(proxy: str) -> None:
    waiting, seen, asked = [proxy], set(), set()
    async with ClientSession() as session:
        while waiting:
            seen.add(url := waiting.pop())
            text = await loaded(session, url)
            found = {urljoin(url, name) for name in re.findall(r'(?:href|src|from)[= ]"([\w./-]+)"', text)}
            waiting += found - seen
            # a script asks from where the page is
            asked |= {urljoin(proxy, name) for name in re.findall(r'fetch\("([^"]+)"', text)}
    assert {urljoin(proxy, name) for name in ("page/files/main.js", "page/files/chat.js", "docs")} <= seen
    paths = ("v1/models", "v1/chat/completions", "page/events")
    assert {urljoin(proxy, path) for path in paths} == asked


@pytest.mark.parametrize("docs", ["docs", "docs/"])
async def test_the_docs_lead_to_a_document_that_names_the_path(proxy: str, docs: str) -> None:
    async with ClientSession() as session:
        page = await loaded(session, urljoin(proxy, docs))
        (link,) = re.findall(r'href="([^"]+)"', page)
        async with session.get(urljoin(urljoin(proxy, docs), link)) as reply:
            document = await reply.json()
    assert document["servers"] == [{"url": PREFIX}]


async def test_without_a_proxy_the_document_names_the_root(prompts: PromptMaker) -> None:
    async with serving(prompts) as server:
        document = (await fetch(server, "GET", "/openapi.json")).json()
    assert document["servers"] == [{"url": "/"}]
