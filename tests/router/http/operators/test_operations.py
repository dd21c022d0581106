"""Endpoints for operators and load balancers, trailing slashes, request ids, and scripts of other sites."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import pytest

from baton.router.http.cors import CorsPolicy
from baton.router.http.openai.prompts import PromptMaker
from baton.router.http.operators.operations import POOLING_PATHS, shown_settings
from baton.router.settings import RouterSettings
from baton.runtime.settings import setting
from baton.wire.codec import PROTOCOL_VERSION
from baton.wire.drafts import DraftsOfMethod
from baton.wire.errors import InvalidSetting
from baton.wire.messages.membership import DECODE, PREFILL
from baton.wire.tiers import TierUsage
from tests.router.fake_node import STATUS, Script, answering
from tests.router.http_client import chat_body, connected, fetch, parse_reply, request_bytes
from tests.router.rig import MODEL, Server, serving

SITE, OTHER_SITE = "https://chat.example.org", "https://elsewhere.example"


@pytest.fixture
async def server(prompts: PromptMaker) -> AsyncIterator[Server]:
    async with serving(prompts) as running:
        yield running


def _saying(prompts: PromptMaker, text: str = "abc") -> Script:
    return answering(prompts.tokenizer.encode(text), "length")


async def test_the_router_is_ready_while_it_has_a_decode_node_and_is_not_draining(server: Server) -> None:
    reply = await fetch(server, "GET", "/ready")
    assert (reply.status, reply.json()["reason"]) == (503, "no decode node is registered")
    _, decode = await server.rig.pair()
    assert (await fetch(server, "GET", "/ready")).json() == {"status": "ok"}
    decode.leave()
    await server.rig.loses(DECODE)
    assert (await fetch(server, "GET", "/ready")).status == 503
    await server.rig.join(DECODE)
    server.endpoints.is_draining = True
    reply = await fetch(server, "GET", "/ready")
    assert (reply.status, reply.json()["reason"]) == (503, "the router is shutting down")


async def test_the_router_lives_without_nodes(server: Server) -> None:
    assert (await fetch(server, "GET", "/live")).status == 200
    for method in ("GET", "POST"):
        reply = await fetch(server, method, "/ping")
        assert (reply.status, reply.body) == (200, b"")
    assert list((await fetch(server, "GET", "/version")).json()) == ["version"]


async def test_server_info_shows_nodes_and_settings(server: Server) -> None:
    prefill = await server.rig.join(PREFILL)
    tiers = (TierUsage("host", 0.25), TierUsage("disk", 0.0009))
    drafts = (DraftsOfMethod("ngram", 4, (4, 3), (2, 1)), DraftsOfMethod("prediction", 1, (1,), ()))
    decode = await server.rig.join(DECODE, status=replace(STATUS, tiers=tiers, drafts=drafts))
    info = (await fetch(server, "GET", "/server_info")).json()
    assert info["protocol_version"] == PROTOCOL_VERSION
    assert info["settings"]["max_attempts"] == 3
    assert [(node["id"], node["role"]) for node in info["nodes"]] == [
        (prefill.hello.node_id, "prefill"),
        (decode.hello.node_id, "decode"),
    ]
    assert {(node["load"], node["num_blocks"], node["num_free_blocks"]) for node in info["nodes"]} == {(0, 64, 64)}
    assert [node["kv_tiers"] for node in info["nodes"]] == [{}, {"host": 0.25, "disk": 0.001}]
    names = ("num_drafts", "num_draft_tokens", "num_accepted_draft_tokens")
    assert [info["nodes"][1][name] for name in names] == [5, 8, 3]


def test_texts_of_settings_are_hidden_unless_they_are_known_to_be_harmless() -> None:
    @dataclass(frozen=True)
    class Settings:
        api_key: str = setting("", "a secret")
        api_keys: tuple[str, ...] = setting((), "secrets")
        host: str = setting("", "an address")
        policy: str = setting("a", "one of few", choices=("a", "b"))
        size: int = setting(0, "a number")

    shown = shown_settings(Settings(api_key="canary", api_keys=("canary",), host="h", size=7))
    assert shown == {"host": "h", "policy": "a", "size": 7}


@pytest.mark.parametrize("path", POOLING_PATHS)
async def test_pooling_endpoints_say_that_no_pooling_model_is_served(server: Server, path: str) -> None:
    reply = await fetch(server, "POST", path, b"{}")
    assert (reply.status, reply.error["code"]) == (404, "no_pooling_model")
    assert "pooling" in reply.error["message"]


async def test_paths_are_served_with_a_slash_at_their_end(server: Server, prompts: PromptMaker) -> None:
    await server.rig.pair(_saying(prompts))
    body = json.dumps(chat_body()).encode()
    assert (await fetch(server, "POST", "/v1/chat/completions/", body)).status == 200
    assert (await fetch(server, "GET", "/v1/models/")).json()["data"][0]["id"] == MODEL
    assert (await fetch(server, "GET", f"/v1/models/{MODEL}/")).json()["id"] == MODEL
    for path in ("/live/", "/health/", "/metrics/", "/version/"):
        assert (await fetch(server, "GET", path)).status == 200


@pytest.mark.parametrize("path", ["//v1/models", "/v1//models", "/v1/models//", "/live//", "//", "/V1/models"])
async def test_other_spellings_of_a_path_stay_unknown(server: Server, path: str) -> None:
    assert (await fetch(server, "GET", path)).status == 404


async def test_a_method_that_a_path_does_not_take_is_named(server: Server) -> None:
    reply = await fetch(server, "GET", "/v1/chat/completions/")
    assert (reply.status, reply.headers["allow"]) == (405, "POST")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_sane_request_id_is_kept_and_echoed(server: Server, prompts: PromptMaker, stream: bool) -> None:
    await server.rig.pair(_saying(prompts))
    body = json.dumps(chat_body(stream=stream)).encode()
    for _ in range(2):  # the same id twice is harmless
        reply = await fetch(server, "POST", "/v1/chat/completions", body, {"X-Request-Id": "job-7.retry_2"})
        assert (reply.status, reply.headers["x-request-id"]) == (200, "job-7.retry_2")


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "naïve", "a/b", '"><script>'])
async def test_other_request_ids_are_replaced(server: Server, given: str) -> None:
    reply = await fetch(server, "GET", "/live", headers={"X-Request-Id": given})
    assert len(reply.headers["x-request-id"]) == 32


async def test_of_two_request_ids_none_is_used(server: Server) -> None:
    async with connected(server) as connection:
        await connection.send(
            request_bytes("GET", "/live").replace(b"host:", b"X-Request-Id: a\r\nX-Request-Id: b\r\nhost:")
        )
        assert len(parse_reply(await connection.to_end()).headers["x-request-id"]) == 32


async def test_scripts_of_other_sites_get_nothing_by_default(server: Server) -> None:
    reply = await fetch(server, "GET", "/v1/models", headers={"Origin": SITE})
    assert not any(name.startswith("access-control") for name in reply.headers)
    preflight = {"Origin": SITE, "Access-Control-Request-Method": "POST"}
    reply = await fetch(server, "OPTIONS", "/v1/models", headers=preflight)
    assert reply.status == 405


async def test_an_allowed_site_may_use_the_router_and_no_other(prompts: PromptMaker) -> None:
    settings = RouterSettings(allowed_origins=(SITE,), allowed_headers=("authorization",), allow_credentials=True)
    async with serving(prompts, router_settings=settings) as server:
        await server.rig.pair(_saying(prompts))
        preflight = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-evil"}
        reply = await fetch(server, "OPTIONS", "/v1/chat/completions", headers={"Origin": SITE, **preflight})
        assert (reply.status, reply.headers["access-control-allow-origin"]) == (204, SITE)
        assert reply.headers["access-control-allow-headers"] == "authorization"
        assert "POST" in reply.headers["access-control-allow-methods"]
        assert reply.headers["access-control-allow-credentials"] == "true"
        body = json.dumps(chat_body(stream=True)).encode()
        reply = await fetch(server, "POST", "/v1/chat/completions", body, {"Origin": SITE})
        assert (reply.headers["access-control-allow-origin"], reply.headers["vary"]) == (SITE, "Origin")
        for method, path in (("OPTIONS", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/nothing")):
            reply = await fetch(server, method, path, headers={"Origin": OTHER_SITE, **preflight})
            assert "access-control-allow-origin" not in reply.headers


async def test_errors_can_be_read_by_scripts_too(prompts: PromptMaker) -> None:
    async with serving(prompts, router_settings=RouterSettings(allowed_origins=("*",))) as server:
        reply = await fetch(server, "GET", "/nothing", headers={"Origin": SITE})
        assert (reply.status, reply.headers["access-control-allow-origin"]) == (404, "*")
        asked = {"Origin": SITE, "Access-Control-Request-Method": "GET"}
        for wanted, allowed in (("authorization, x-stainless-os", "authorization, x-stainless-os"), ("a\tb", None)):
            headers = {**asked, "Access-Control-Request-Headers": wanted}
            reply = await fetch(server, "OPTIONS", "/v1/models", headers=headers)
            assert reply.headers.get("access-control-allow-headers") == allowed


@pytest.mark.parametrize("origin", ["example.org", "https://example.org/", '["*"]', "https://"])
def test_an_origin_that_no_browser_would_send_is_refused(origin: str) -> None:
    with pytest.raises(InvalidSetting, match="--allowed-origins"):
        CorsPolicy((origin,))


def test_credentials_for_every_site_are_refused() -> None:
    with pytest.raises(InvalidSetting, match="--allow-credentials"):
        CorsPolicy(("*",), allows_credentials=True)
