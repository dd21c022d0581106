"""`POST /admin/drain`: who may ask for it, and what is answered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from baton.router.http.access.guard import Guard
from baton.router.http.access.keys import digest_of
from baton.router.http.openai.prompts import PromptMaker
from baton.wire.messages.membership import DECODE, Drain
from tests.router.http_client import Reply, fetch
from tests.router.rig import Server, serving

JSON = {"content-type": "application/json"}


async def drain(server: Server, key: str = "", headers: dict[str, str] = JSON, **members: object) -> Reply:
    given = {**headers, "authorization": f"Bearer {key}"} if key else headers
    return await fetch(server, "POST", "/admin/drain", json.dumps(members).encode(), given)


@pytest.mark.parametrize("restart", [False, True])
async def test_a_node_is_asked_to_end_and_gets_no_more_work(prompts: PromptMaker, restart: bool) -> None:
    async with serving(prompts) as server:
        node = await server.rig.join(DECODE)
        reply = await drain(server, node=node.hello.node_id, restart=restart)
        assert (reply.status, reply.json()) == (
            200, {"node": node.hello.node_id, "role": "decode", "num_requests": 0}
        )  # fmt: skip
        assert server.rig.member(node).is_leaving
        assert await node.expect(Drain) == Drain(starts_again=restart)
        (info,) = (await fetch(server, "GET", "/server_info")).json()["nodes"]
        assert info["is_leaving"]


async def test_a_group_is_asked_by_its_name_and_a_node_of_it_by_its_own(prompts: PromptMaker) -> None:
    async with serving(prompts) as server:
        one, two = [await server.rig.join(DECODE, group="rack") for _ in range(2)]
        other = await server.rig.join(DECODE, group="hall")
        assert (await drain(server, node=one.hello.node_id)).status == 200
        assert [server.rig.member(node).is_leaving for node in (one, two)] == [True, False]
        reply = await drain(server, node="rack")
        assert reply.json() == {"node": "rack", "role": "decode", "num_requests": 0}
        assert [server.rig.member(node).is_leaving for node in (one, two, other)] == [True, True, False]
        infos = (await fetch(server, "GET", "/server_info")).json()["nodes"]
        assert [info["group"] for info in infos] == ["rack", "rack", "hall"]


async def test_an_unknown_node_is_not_found(prompts: PromptMaker) -> None:
    async with serving(prompts) as server:
        reply = await drain(server, node="decode-7")
        assert (reply.status, reply.error["code"], reply.error["param"]) == (404, "node_not_found", "node")


async def test_a_mixed_node_is_told_nothing_and_gets_other_legs(prompts: PromptMaker) -> None:
    async with serving(prompts) as server:
        mixed, plain = await server.rig.join(DECODE, prefers="decode"), await server.rig.join(DECODE)
        replies = []
        for node in (mixed, plain):
            body = json.dumps({"node": node.hello.node_id, "role": "prefill"}).encode()
            replies.append(await fetch(server, "POST", "/admin/prefer", body, JSON))
        assert [reply.status for reply in replies] == [200, 404]
        infos = (await fetch(server, "GET", "/server_info")).json()["nodes"]
        assert [info["prefers"] for info in infos] == [["prefill"], ["decode"]]


@pytest.mark.parametrize(
    ("members", "param"),
    [({}, "node"), ({"node": 7}, "node"), ({"node": ""}, "node"), ({"node": "d", "now": True}, "now")],
)
async def test_a_body_that_means_nothing_is_refused(prompts: PromptMaker, members: dict[str, Any], param: str) -> None:
    async with serving(prompts) as server:
        node = await server.rig.join(DECODE)  # of no group
        reply = await drain(server, **members)
        assert (reply.status, reply.error["param"]) == (400, param)
        assert not server.rig.member(node).is_leaving


async def test_what_a_browser_sends_for_another_site_without_asking_is_refused(prompts: PromptMaker) -> None:
    async with serving(prompts) as server:
        node = await server.rig.join(DECODE)
        assert (await drain(server, headers={"content-type": "text/plain"}, node=node.hello.node_id)).status == 415
        assert not server.rig.member(node).is_leaving


async def test_only_an_operators_key_may_drain(prompts: PromptMaker, tmp_path: Path) -> None:
    entries = {"alice": "", "olga": "operator = true"}
    text = "".join(f'[{name}]\nsha256 = "{digest_of(name).hex()}"\n{more}\n' for name, more in entries.items())
    (tmp_path / "keys.toml").write_text(text)
    async with serving(prompts, guard=Guard(tmp_path / "keys.toml", "of-the-environment", b"s" * 32)) as server:
        node = await server.rig.join(DECODE)
        assert (await drain(server, node=node.hello.node_id)).status == 401
        reply = await drain(server, "alice", node=node.hello.node_id)
        assert (reply.status, reply.error["code"]) == (403, "forbidden")
        assert not server.rig.member(node).is_leaving
        assert (await drain(server, "olga", node=node.hello.node_id)).status == 200
        assert (await drain(server, "of-the-environment", node=node.hello.node_id)).status == 200


async def test_without_keys_only_this_machine_may_drain(prompts: PromptMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(prompts) as server:
        node = await server.rig.join(DECODE)
        monkeypatch.setattr(web.BaseRequest, "remote", "192.0.2.7")
        assert (await drain(server, node=node.hello.node_id)).status == 403
        assert not server.rig.member(node).is_leaving
