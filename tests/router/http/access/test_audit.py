"""The audit log says who asked for how much, and not what."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from baton.router.http.access.audit import AuditLog
from baton.router.http.access.guard import Guard
from baton.router.http.access.keys import digest_of
from baton.router.http.openai.prompts import PromptMaker
from baton.wire.errors import InvalidSetting
from baton.wire.messages.legs import Decode
from baton.wire.messages.membership import DECODE
from tests.router.fake_node import answering
from tests.router.http_client import Reply, completion_body, connected, fetch, request_bytes
from tests.router.rig import MODEL, Server, serving

KEY = {"authorization": "Bearer canary-key"}
COMPLETIONS = "/v1/completions"
PROMPT = "canary-prompt and more"


class Audit:
    """An audit log and its lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log = AuditLog(str(path))

    def lines(self) -> list[dict[str, Any]]:
        """All lines so far."""
        text = self.path.read_text()
        assert "canary" not in text
        return [json.loads(line) for line in text.splitlines()]

    async def has_lines(self, number: int) -> list[dict[str, Any]]:
        """Wait for so many lines."""
        async with asyncio.timeout(30):
            while len(self.lines()) < number:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        return self.lines()


@pytest.fixture
def audit(tmp_path: Path) -> Audit:
    return Audit(tmp_path / "audit.jsonl")


@pytest.fixture
async def server(prompts: PromptMaker, tmp_path: Path, audit: Audit) -> AsyncIterator[Server]:
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[alice]\nsha256 = "{digest_of("canary-key").hex()}"\n')
    async with serving(prompts, guard=Guard(keys, "", b"s" * 32), audit=audit.log) as running:
        yield running
    audit.log.close()


async def _post(server: Server, headers: dict[str, str], **members: object) -> Reply:
    body = json.dumps(completion_body(prompt=PROMPT, **members)).encode()
    return await fetch(server, "POST", COMPLETIONS, body, headers)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_one_line(server: Server, audit: Audit, prompts: PromptMaker, stream: bool) -> None:
    await server.rig.join(DECODE, answering([5, 6], "length"))
    reply = await _post(server, KEY, stream=stream, user="canary-user")
    (line,) = await audit.has_lines(1)
    assert line.pop("duration_s") > 0
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "request_id": reply.headers["x-request-id"],
        "key": "alice",
        "method": "POST",
        "route": COMPLETIONS,
        "model": MODEL,
        "prompt_tokens": len(prompts.tokenizer.encode(PROMPT)),
        "completion_tokens": 2,
        "is_complete": True,
        "status": 200,
    }
    assert audit.path.stat().st_mode & 0o777 == 0o600


async def test_refused_requests_have_a_line_and_probes_have_none(server: Server, audit: Audit) -> None:
    await fetch(server, "GET", "/health")
    await _post(server, {})
    await _post(server, {"authorization": "Bearer canary-wrong"})
    await fetch(server, "GET", "/canary", headers=KEY)
    await _post(server, KEY, model="canary-model")
    await fetch(server, "GET", "/v1/models", headers=KEY)
    lines = await audit.has_lines(5)
    assert [(line["status"], line["key"], line["route"]) for line in lines] == [
        (401, None, COMPLETIONS),
        (401, None, COMPLETIONS),
        (404, "alice", None),
        (404, "alice", COMPLETIONS),
        (200, "alice", "/v1/models"),
    ]
    assert {line["model"] for line in lines} == {None}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_has_a_line_with_what_it_got(server: Server, audit: Audit, stream: bool) -> None:
    decode = await server.rig.join(DECODE)
    async with connected(server) as connection:
        body = json.dumps(completion_body(stream=stream)).encode()
        await connection.send(request_bytes("POST", COMPLETIONS, body, KEY))
        decode.emit(await decode.expect(Decode), [70, 71])
        if stream:
            await connection.until(b"data: ")
        await server.rig.has_heard(decode)
    (line,) = await audit.has_lines(1)
    assert (line["status"], line["is_complete"]) == (499, False)
    if stream:
        assert line["completion_tokens"] == 2


async def test_a_renamed_file_is_left_behind_on_reload(
    server: Server, audit: Audit, caplog: pytest.LogCaptureFixture
) -> None:
    await _post(server, {})
    await audit.has_lines(1)
    audit.path.rename(audit.path.with_suffix(".1"))
    audit.log.reload()
    assert audit.lines() == []
    await _post(server, {})
    await audit.has_lines(1)
    audit.path.unlink()
    audit.path.mkdir()
    with caplog.at_level(logging.ERROR):
        audit.log.reload()
    assert "stays where it was" in caplog.text
    assert (await _post(server, {})).status == 401


def test_a_file_that_cannot_be_written_is_one_sentence() -> None:
    with pytest.raises(InvalidSetting, match="--audit-log /no/such/folder/audit: No such file"):
        AuditLog("/no/such/folder/audit")


async def test_a_full_disk_ends_nothing_and_the_log_goes_on_elsewhere(
    prompts: PromptMaker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "audit.jsonl"
    path.symlink_to("/dev/full")
    audit = Audit(path)
    async with serving(prompts, audit=audit.log) as running:
        assert (await fetch(running, "GET", "/v1/models")).status == 200
        assert "a line of the audit log was lost: No space left on device" in caplog.text
        path.unlink()
        audit.log.reload()
        assert (await fetch(running, "GET", "/v1/models")).status == 200
        await audit.has_lines(1)
        path.unlink()
        path.symlink_to("/dev/full")
        audit.log.reload()
        assert (await fetch(running, "GET", "/v1/models")).status == 200
    audit.log.close()
