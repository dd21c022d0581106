"""A router with API keys on a real port: nothing is open by accident, and each key has its limits."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from baton.router.http.access.guard import INVALID_KEY, OPEN_ROUTES, Guard, require_keys_beyond_loopback
from baton.router.http.access.keys import digest_of
from baton.router.http.openai.prompts import PromptMaker
from baton.router.http.page.serving import EVENTS_PATH
from baton.wire.errors import InvalidSetting
from baton.wire.messages.legs import Decode
from baton.wire.messages.membership import DECODE
from tests.router.fake_node import answering
from tests.router.http_client import Reply, completion_body, connected, fetch, parse_reply, request_bytes
from tests.router.rig import Server, serving

SECRET = b"s" * 32
COMPLETIONS = "/v1/completions"


def _entry(name: str, *limits: str) -> str:
    """The entry of a key that is "key-of-" and its name."""
    return "\n".join((f"[{name}]", f'sha256 = "{digest_of(f"key-of-{name}").hex()}"', *limits, ""))


@asynccontextmanager
async def _guarded(prompts: PromptMaker, tmp_path: Path, *entries: str) -> AsyncIterator[tuple[Server, Guard]]:
    path = tmp_path / "keys.toml"
    path.write_text("".join(entries))
    guard = Guard(path, "", SECRET)
    async with serving(prompts, guard=guard) as server:
        yield server, guard


def _bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer key-of-{name}"}


async def _post(server: Server, name: str, **members: object) -> Reply:
    return await fetch(server, "POST", COMPLETIONS, json.dumps(completion_body(**members)).encode(), _bearer(name))


def _is_denied(reply: Reply) -> bool:
    assert reply.status == 401
    if "request_id" in reply.json():  # Anthropic's form
        assert reply.json()["error"]["type"] == "authentication_error"
    else:
        assert reply.error["code"] == "invalid_api_key"
    return reply.headers["www-authenticate"] == "Bearer"


async def test_every_route_needs_a_key_but_those_about_life(prompts: PromptMaker, tmp_path: Path) -> None:
    async with _guarded(prompts, tmp_path, _entry("alice")) as (server, _):
        assert server.app is not None
        routes = {
            (route.method, route.resource.canonical)
            for route in server.app.router.routes()
            if route.resource is not None and route.method != "*"
        }
        assert {("POST", COMPLETIONS), ("GET", "/metrics"), ("GET", "/health")} <= routes
        for method, canonical in sorted(routes):
            path = canonical.split("{")[0] + ("name" if "{" in canonical else "")
            if canonical in OPEN_ROUTES:
                assert (await fetch(server, method, path)).status in (200, 404, 503)
                continue
            for tried in (path, path + "/"):
                reply = await fetch(server, method, tried)
                assert reply.status == 401 if method == "HEAD" else _is_denied(reply)
            if method != "HEAD" and path.rstrip("/") != EVENTS_PATH:  # that one has no end
                assert (await fetch(server, method, path, headers=_bearer("alice"))).status != 401


@pytest.mark.parametrize(
    "path",
    ["//v1/models", "/v1/../v1/models", "/v1/%2e%2e/v1/models", "/v1%2fmodels", "/V1/models", "/health/../v1/models",
     "/health/", "/health%2f..%2fmetrics", "/metrics?x=/health", "//", "/page", "/page/events",
     "/nothing", "/%00", "/health;/v1/models"],
)  # fmt: skip
async def test_no_spelling_of_a_path_leads_around_the_guard(prompts: PromptMaker, tmp_path: Path, path: str) -> None:
    async with _guarded(prompts, tmp_path, _entry("alice")) as (server, _):
        assert _is_denied(await fetch(server, "GET", path))


@pytest.mark.parametrize(
    "value",
    ["Bearer", "Bearer     ", "Bearer  ", "key-of-alice", "Basic key-of-alice", "Bearer key-of-alic", "Bearer Bearer",
     "Bearer key-of-alice key-of-alice", "Bearer key-of-alice,", "Bearer KEY-OF-ALICE", "Bearer\tkey-of-alice",
     "Bearer " + "x" * 8000, f"Bearer {digest_of('key-of-alice').hex()}"],
    ids=lambda value: value[:24],
)  # fmt: skip
async def test_what_is_no_valid_key_is_denied(prompts: PromptMaker, tmp_path: Path, value: str) -> None:
    async with _guarded(prompts, tmp_path, _entry("alice")) as (server, guard):
        reply = await fetch(server, "GET", "/v1/models", headers={"authorization": value})
        assert _is_denied(reply)
        assert "key-of" not in reply.body.decode()
        assert guard.rejected[INVALID_KEY] == 1


async def test_two_authorization_headers_are_none_and_long_ones_are_wrong(prompts: PromptMaker, tmp_path: Path) -> None:
    async with _guarded(prompts, tmp_path, _entry("alice")) as (server, guard):
        key = "Bearer key-of-alice"
        assert guard.identify([key]) is not None
        assert guard.identify([key, key]) is None
        assert guard.identify([]) is None
        assert guard.identify(["Bearer " + "x" * 2**20]) is None
        async with connected(server) as connection:
            head = f"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: {key}\r\nauthorization: {key}\r\n"
            await connection.send(f"{head}connection: close\r\n\r\n".encode())
            assert parse_reply(await connection.to_end()).status in (400, 401)


async def test_the_scheme_is_not_case_sensitive(prompts: PromptMaker, tmp_path: Path) -> None:
    async with _guarded(prompts, tmp_path, _entry("alice")) as (server, _):
        reply = await fetch(server, "GET", "/v1/models", headers={"authorization": "bearer key-of-alice"})
        assert reply.status == 200


async def test_anthropics_header_holds_a_key_too(prompts: PromptMaker, tmp_path: Path) -> None:
    async with _guarded(prompts, tmp_path, _entry("alice")) as (server, _):
        for headers, status in (
            ({"x-api-key": "key-of-alice"}, 200),
            ({"x-api-key": "key-of-bob"}, 401),
            ({"x-api-key": "key-of-alice", "authorization": "Bearer key-of-bob"}, 401),
            ({"x-api-key": "key-of-bob", **_bearer("alice")}, 200),
        ):
            assert (await fetch(server, "GET", "/v1/models", headers=headers)).status == status
        denied = await fetch(server, "POST", "/v1/messages", b"{}", {"x-api-key": "key-of-bob"})
        assert _is_denied(denied)


async def test_a_key_in_the_environment_counts_beside_the_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(_entry("alice"))
    guard = Guard(path, "from-the-environment", SECRET)
    names = {guard.identify([f"Bearer {key}"]) for key in ("key-of-alice", "from-the-environment")}
    assert {identity.name for identity in names if identity} == {"alice", "environment"}
    path.write_text(_entry("environment"))
    with pytest.raises(InvalidSetting, match="BATON_API_KEY"):
        Guard(path, "from-the-environment", SECRET)


async def test_reading_the_file_again_changes_keys_and_keeps_counts(
    prompts: PromptMaker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with _guarded(prompts, tmp_path, _entry("alice", "requests_per_minute = 2"), _entry("bob")) as (
        server,
        guard,
    ):
        await server.rig.join(DECODE, answering([5], "length"))
        assert (await _post(server, "alice")).status == 200
        path = tmp_path / "keys.toml"
        path.write_text(_entry("alice", "requests_per_minute = 3") + _entry("carol"))
        guard.reload()
        assert (await _post(server, "carol")).status == 200
        assert _is_denied(await _post(server, "bob"))
        assert (await _post(server, "alice")).headers["x-ratelimit-remaining-requests"] == "1"
        path.write_text("[alice\nsha256 = key-of-alice")
        with caplog.at_level(logging.ERROR):
            guard.reload()
        assert "stay as they were" in caplog.text
        assert "key-of-alice" not in caplog.text
        assert (await _post(server, "alice")).status == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_limit_is_told_in_every_answer_and_ends_in_429(
    prompts: PromptMaker, tmp_path: Path, stream: bool
) -> None:
    async with _guarded(prompts, tmp_path, _entry("alice", "requests_per_minute = 1"), _entry("bob")) as (
        server,
        guard,
    ):
        await server.rig.join(DECODE, answering([5], "length"))
        reply = await _post(server, "alice", stream=stream)
        assert reply.status == 200
        assert (reply.headers["x-ratelimit-limit-requests"], reply.headers["x-ratelimit-remaining-requests"]) == (
            "1",
            "0",
        )
        refused = await _post(server, "alice", stream=stream)
        assert (refused.status, refused.error["type"], refused.error["code"]) == (
            429,
            "rate_limit_error",
            "rate_limited",
        )
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert (await _post(server, "bob", stream=stream)).status == 200
        models = await fetch(server, "GET", "/v1/models", headers=_bearer("alice"))
        assert models.status == 200
        assert guard.rejected["requests_per_minute"] == 1


async def test_requests_at_once_are_limited_and_one_that_its_client_leaves_is_over(
    prompts: PromptMaker, tmp_path: Path
) -> None:
    async with _guarded(prompts, tmp_path, _entry("alice", "max_concurrent_requests = 1")) as (server, guard):
        decode = await server.rig.join(DECODE)
        (alice,) = guard.identities
        async with connected(server) as connection:
            body = json.dumps(completion_body()).encode()
            await connection.send(request_bytes("POST", COMPLETIONS, body, _bearer("alice")))
            await decode.expect(Decode)
            assert (await _post(server, "alice")).status == 429
        await server.rig.settle()
        async with asyncio.timeout(30):
            while alice.account.num_running:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        decode.script = answering([5], "length")
        assert (await _post(server, "alice")).status == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_beyond_loopback_there_are_keys_or_a_word_that_none_are_wanted(host: str) -> None:
    with pytest.raises(InvalidSetting, match="baton keys new"):
        require_keys_beyond_loopback(host, has_keys=False, allows_anyone=False)
    require_keys_beyond_loopback(host, has_keys=True, allows_anyone=False)
    require_keys_beyond_loopback(host, has_keys=False, allows_anyone=True)
    require_keys_beyond_loopback("127.0.0.1", has_keys=False, allows_anyone=False)
