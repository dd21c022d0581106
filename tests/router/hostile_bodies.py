"""Bodies that are made to cost much: what other streams and `/health` see meanwhile, and the memory that stays.

    python -m tests.router.hostile_bodies                       # all kinds, 1 and 16 at once
    python -m tests.router.hostile_bodies keys ids --at-once 16

The router is the real program with one node that has no model. Bodies are as large as the router takes them. Prints a
row of a table for each kind.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from tests.checkpoints import make_checkpoint
from tests.router.bystanders import watching
from tests.router.crowds import Paced
from tests.router.http_client import parse_reply, request_bytes
from tests.router.router_process import RouterProcess, router_process

MAX_BYTES = 8 * 2**20 - 2048
NUM_KEYS, NUM_IDS = 600_000, 10**6
PATIENCE_S = 120.0
_QUIET_S = 2.0
_CHAT, _COMPLETIONS, _RESPONSES, _MESSAGES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
)
_HELLO = [{"role": "user", "content": "hello"}]


def _json(**members: object) -> bytes:
    return json.dumps(members, separators=(",", ":")).encode()


def _keys() -> dict[str, int]:
    return {f"k{number:07}": 1 for number in range(NUM_KEYS)}


def _many(item: object) -> list[object]:
    return [item] * (MAX_BYTES // (len(json.dumps(item)) + 1))


def _chat(**members: object) -> bytes:
    return _json(**{"model": "tiny", "messages": _HELLO, "max_tokens": 2, **members})


def _with(head: str, filler: str, tail: str) -> bytes:
    """A body of `MAX_BYTES`: as much `filler` between `head` and `tail` as there is room for."""
    return (head + filler * ((MAX_BYTES - len(head) - len(tail)) // len(filler)) + tail).encode()


KINDS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "keys": (_CHAT, lambda: _chat(**_keys())),
    "keys-completions": (_COMPLETIONS, lambda: _json(model="tiny", prompt="hello", **_keys())),
    "keys-responses": (_RESPONSES, lambda: _json(model="tiny", input="hello", **_keys())),
    "keys-messages": (_MESSAGES, lambda: _json(model="tiny", max_tokens=2, messages=_HELLO, **_keys())),
    "keys-tokenize": ("/tokenize", lambda: _json(prompt="hello", **_keys())),
    "keys-admin": ("/admin/drain", lambda: _json(node="none", **_keys())),
    "keys-duplicate": (_CHAT, lambda: _with('{"model":"tiny"', ',"k":1', "}")),
    "logit-bias": (_CHAT, lambda: _chat(logit_bias={str(number): 1 for number in range(NUM_KEYS)})),
    "detokenize": ("/detokenize", lambda: _json(tokens=[number % 100 for number in range(NUM_IDS)])),
    "prompt-ids": (_COMPLETIONS, lambda: _json(model="tiny", prompt=[number % 100 for number in range(NUM_IDS)])),
    "prompt-floats": (_COMPLETIONS, lambda: _json(model="tiny", prompt=_many(0.5))),
    "small-lists": (_COMPLETIONS, lambda: _json(model="tiny", prompt=_many([]))),
    "small-objects": (_CHAT, lambda: _chat(messages=_many({}))),
    "messages": (_CHAT, lambda: _chat(messages=_many(_HELLO[0]))),
    "parts": (_CHAT, lambda: _chat(messages=[{"role": "user", "content": _many({"type": "text", "text": "a"})}])),
    "tools": (
        _CHAT,
        lambda: _chat(
            tools=[
                {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": _keys()}}}
            ]
        ),
    ),
    "stops": (_CHAT, lambda: _chat(stop=_many("a"))),
    "nested": (_CHAT, lambda: _with('{"a":', "[", "")),
    "escapes": (_CHAT, lambda: _with('{"model":"tiny","messages":[{"role":"user","content":"', "\\u00e9", '"}]}')),
    "escaped-key": (_CHAT, lambda: _with('{"', "\\n", '":1}')),
    "digits": (_CHAT, lambda: _with('{"a":', "9", "}")),
    "blanks": (_CHAT, lambda: _with('{"model":"tiny"', " ", "}")),
    "text": (_COMPLETIONS, lambda: _json(model="tiny", prompt="word, " * (2**20 // 6), max_tokens=2)),
    "gzip": (_CHAT, lambda: gzip.compress(_chat(**_keys()), 1)),
    "gzip-bomb": (_CHAT, lambda: gzip.compress(b" " * 2**30, 1)),
}


def _send(address: tuple[str, int], request: bytes) -> int:
    """Send a request to the router and read its answer; the status, 0 when the connection broke."""
    received = bytearray()
    try:
        with socket.create_connection(address, PATIENCE_S) as connection:
            connection.sendall(request)
            while data := connection.recv(2**16):
                received += data
    except OSError:
        pass
    return parse_reply(bytes(received)).status if received else 0


async def measure(router: RouterProcess, kind: str, num_at_once: int) -> str:
    """A row of the table."""
    path, make = KINDS[kind]
    body = make().replace(b'"model":"tiny"', b'"model":' + json.dumps(router.name).encode())
    headers = {"content-encoding": "gzip"} if kind.startswith("gzip") else {}
    request = request_bytes("POST", path, body, headers)
    host, _, port = router.ready["address"].removeprefix("http://").rpartition(":")
    process = psutil.Process(router.process.pid)
    before, most = process.memory_info().rss, 0
    async with watching(host, int(port), router.name) as seen:
        await asyncio.sleep(_QUIET_S / 2)
        begun_s = time.monotonic()
        sending = [
            asyncio.create_task(asyncio.to_thread(_send, (host, int(port)), request)) for _ in range(num_at_once)
        ]
        while not all(task.done() for task in sending):
            most = max(most, process.memory_info().rss)
            await asyncio.sleep(0.01)
        took_s = time.monotonic() - begun_s
        await asyncio.sleep(_QUIET_S)
    statuses = dict(Counter(task.result() for task in sending))
    after = process.memory_info().rss
    memory = ", ".join(f"{value / 2**20:.0f}" for value in (before, most, after))
    return (
        f"| {kind} x {num_at_once}, {len(body) / 1e6:.1f} MB | {statuses} in {took_s:.1f} s | {seen} | {memory} MiB |"
    )


async def _main(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="baton-bodies-") as folder:
        checkpoint = make_checkpoint(Path(folder) / "tiny", "llama")
        for kind in options.kinds or KINDS:
            for num_at_once in options.at_once:
                async with router_process(checkpoint, max_request_tokens=200_000, max_num_seqs=64) as router:
                    pace = Paced(router.node, 64)
                    sys.stdout.write(await measure(router, kind, num_at_once) + "\n")
                    sys.stdout.flush()
                    pace.close()


def main(arguments: Sequence[str]) -> None:
    """Measure the kinds that are named, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kinds", nargs="*", choices=[*KINDS, []], metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--at-once", type=int, nargs="*", default=[1, 16])
    asyncio.run(_main(parser.parse_args(arguments)))


if __name__ == "__main__":
    main(sys.argv[1:])
