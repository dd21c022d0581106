"""Whoever attacks a deployment: strangers at each port, without a key or with a wrong one, and insiders with a key.

Owns what they send. Each has a thread of its own, draws everything from a seed, and goes on until it is told to stop;
what its victims answer does not matter to it. `Knowledge` is what an insider of the deployment knows.
"""

from __future__ import annotations

import json
import random
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import zmq

from baton.kvtransfer.messages import (
    RECEIVER_TO_SENDER,
    Endpoint,
    Grant,
    HandoffName,
    PeerHello,
    ProcessIdentity,
    Release,
    Renew,
    Revoke,
)
from baton.kvtransfer.transports.nixl.wire import DETAILS, PoolDetails
from baton.kvtransfer.transports.tcp_zmq import BlockBatch
from baton.wire import links
from baton.wire.codec import Codec
from baton.wire.links import LinkSettings
from baton.wire.messages.membership import DECODE, Heartbeat, Hello, Leaving, Pong, Resume, Welcome, control_identity
from baton.wire.messages.output import Failed, TokenEvent, Tokens
from baton.wire.messages.prefixes import CacheEvents
from baton.wire.messages.vocabulary import NODE_TO_ROUTER, ROUTER_TO_NODE
from tests.kvtransfer.test_wire_fuzz import Forge, odd, sealed

_TIMEOUT_S = 0.3
_PAUSE_S = 0.002
_HOST = "127.0.0.1"
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00"
_DATA = Codec(BlockBatch)
TO_ROUTER = Codec(Hello, Heartbeat, Pong, Resume, Leaving, Tokens, Failed, CacheEvents)
"""As `NODE_TO_ROUTER`, without the message whose bytes have a length that depends on another field."""
_PATHS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models", "/metrics", "/health", "/", "//v1"),
    *("/v1/responses/resp_0", "/v1/responses/..%2f..%2fx/input_items", f"/v1/responses/resp_{'0' * 32}"),
    *("/v1/../etc/passwd", "/v1/%2f", "/tokenize", "/debug/requests", "/openapi.json", "/V1/chat/completions"),
)
Context = zmq.Context[zmq.Socket[bytes]]


@dataclass(frozen=True, slots=True)
class Knowledge:
    """A real decode node's Hello, and of the prefill node its address for peers and its epoch."""

    hello: Hello
    peer_address: str
    peer_epoch: int


class Attacker(threading.Thread):
    """Calls `act` again and again. `failure`: what ended it, if it was not told to stop."""

    def __init__(self, name: str, seed: int) -> None:
        super().__init__(name=name, daemon=True)
        self.chance = random.Random(f"{name}:{seed}")
        self.num_acts = 0
        self.failure: Exception | None = None
        self._is_told = threading.Event()

    def act(self) -> None:
        """One attempt."""
        raise NotImplementedError

    def run(self) -> None:
        """Attack until told to stop."""
        while not self._is_told.wait(_PAUSE_S):
            try:
                self.act()
            except (OSError, zmq.ZMQError):
                pass  # refused, reset or full: what a victim may do
            except Exception as error:  # a mistake of the attacker ends its attack, which has to be noticed
                self.failure = error
                return
            self.num_acts += 1

    def stop(self) -> None:
        """End it."""
        self._is_told.set()
        self.join(10)


class RawBytes(Attacker):
    """Connects to any port and sends what is no message of anything."""

    def __init__(self, name: str, ports: Sequence[int], seed: int) -> None:
        super().__init__(name, seed)
        self._ports = ports

    def act(self) -> None:
        chance = self.chance
        with socket.create_connection((_HOST, chance.choice(self._ports)), _TIMEOUT_S) as link:
            link.settimeout(_TIMEOUT_S)
            link.sendall(self._noise())
            if chance.random() < 0.3:
                with suppress(OSError):
                    link.recv(4096)
            if chance.random() < 0.3:
                link.sendall(chance.randbytes(chance.choice((1, 100, 10_000))))

    def _noise(self) -> bytes:
        chance = self.chance
        return chance.choice(
            (
                b"",
                chance.randbytes(chance.choice((1, 64, 4096))),
                _GREETING + b"NULL" + bytes(16) + b"\x00" + bytes(31) + chance.randbytes(200),
                _GREETING + b"CURVE" + bytes(15) + b"\x01" + bytes(31) + b"\x04\xc8\x05HELLO" + chance.randbytes(194),
                _GREETING + b"PLAIN" + bytes(15) + b"\x00" + bytes(31) + b"\x04\x08\x05HELLO\x00\x00",
                b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a: " + b"b" * chance.choice((10, 10_000)) + b"\r\n\r\n",
                b"POST /v1/completions HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n{",
                b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + chance.randbytes(200),
            )
        )


class HttpRequests(Attacker):
    """Asks the router, and the health ports, for what is wrong in some way; or leaves, or reads nothing."""

    def __init__(self, name: str, ports: Sequence[int], model: str, seed: int) -> None:
        super().__init__(name, seed)
        self._ports = ports
        self._model = model

    def act(self) -> None:
        chance = self.chance
        with socket.create_connection((_HOST, chance.choice(self._ports)), _TIMEOUT_S) as link:
            link.settimeout(_TIMEOUT_S)
            request = self._request()
            link.sendall(request if chance.random() < 0.8 else request[: chance.randrange(len(request))])
            if chance.random() < 0.8:
                with suppress(OSError):
                    while link.recv(65536):
                        pass

    def _request(self) -> bytes:
        chance = self.chance
        body = self._body()
        method = chance.choice(("POST", "POST", "POST", "POST", "GET", "PUT", "DELETE", "OPTIONS", "BREW"))
        length = len(body) if chance.random() < 0.95 else chance.choice((0, 1, len(body) + 1, -1, 2**40))
        head = [f"{method} {chance.choice(_PATHS)} HTTP/1.1", "Host: x", f"Content-Length: {length}"]
        head += [chance.choice(("Content-Type: application/json", "Content-Type: text/plain", "X: \x00"))]
        head += ["Connection: close"] * (chance.random() < 0.8)
        return "\r\n".join(head).encode() + b"\r\n\r\n" + body

    def _body(self) -> bytes:
        chance = self.chance
        fields: dict[str, Any] = {"model": self._model, "max_tokens": 2, "stream": chance.random() < 0.5}
        fields |= chance.choice(({"prompt": "x"}, {"messages": [{"role": "user", "content": "x"}]}))
        names = ("prompt", "messages", "n", "stop", "seed", "logit_bias", "response_format", "tools", "temperature")
        for _ in range(chance.randrange(4)):
            fields[chance.choice((*fields, *names, "guided_regex", "min_tokens", "best_of"))] = _odd_json(chance)
        body = json.dumps(fields).encode()
        if chance.random() < 0.2:
            place = chance.randrange(len(body))
            body = body[:place] + chance.randbytes(3) + body[place + 3 :]
        return body


class Frames(Attacker):
    """Dials a ZMQ socket and sends damaged and forged messages of `codec`, with and without more frames. A connection
    serves for some of them, since a bad one may cost it."""

    def __init__(self, name: str, kind: int, address: str, settings: LinkSettings, codec: Codec, seed: int) -> None:
        super().__init__(name, seed)
        self._context: Context = zmq.Context()
        self._kind, self._address, self._settings = kind, address, settings
        self._forge = Forge(codec, self.chance)
        self._link: zmq.Socket[bytes] | None = None
        self._num_left = 0

    def act(self) -> None:
        if self._num_left == 0 or self._link is None:
            self._dial()
        self._num_left -= 1
        assert self._link is not None
        self._link.send_multipart(self.frames(), zmq.NOBLOCK)
        with suppress(zmq.Again):
            while self._kind == zmq.DEALER:
                self.hear(self._link.recv_multipart(zmq.NOBLOCK))

    def identity(self) -> bytes:
        """Of the next connection; b"" for one that ZMQ chooses."""
        chance = self.chance
        return chance.choice((b"", b"", chance.randbytes(9), control_identity(chance.getrandbits(63))))

    def hear(self, frames: Sequence[bytes]) -> None:
        """Take an answer."""

    def first(self) -> list[bytes]:
        """What a new connection begins with; nothing by default."""
        return []

    def frames(self) -> list[bytes]:
        """The next message."""
        chance = self.chance
        frame = chance.choice((self._forge.damaged, self._forge.forged))()
        roll = chance.random()
        if roll < 0.02:
            return [sealed(chance.randbytes(chance.choice((70_000, 2**20))))]
        if roll < 0.2:
            return [chance.randbytes(chance.choice((0, 8, 8, 9))), frame]
        if roll < 0.25:
            return [frame] * chance.choice((3, 50))
        return [frame]

    def stop(self) -> None:
        """End it, and its connection."""
        super().stop()
        self._context.destroy(linger=0)

    def _dial(self) -> None:
        if self._link is not None:
            self._link.close(linger=0)
        self._link = links.open_socket(self._context, self._kind, self._settings)
        identity = self.identity()
        if identity and self._kind == zmq.DEALER:
            self._link.setsockopt(zmq.IDENTITY, identity)
        links.connect(self._link, self._address, self._settings)
        self._num_left = self.chance.choice((1, 10, 40))
        if first := self.first():
            self._link.send_multipart(first, zmq.NOBLOCK)


class PeerFrames(Frames):
    """An insider at a prefill node's port: says a right hello, but for its endpoint, and then what it likes."""

    def __init__(self, kv_transport: str, address: str, settings: LinkSettings, known: Knowledge, seed: int) -> None:
        super().__init__("insider at P", zmq.DEALER, known.peer_address, settings, RECEIVER_TO_SENDER, seed)
        self._known = known
        self._kv_transport = kv_transport
        self._data_address = address

    def identity(self) -> bytes:
        return b""

    def first(self) -> list[bytes]:
        chance, hello = self.chance, self._known.hello
        address = chance.choice((self._data_address, "tcp://127.0.0.1:9", chance.randbytes(16).hex(), "baton-0"))
        endpoint = Endpoint(self._kv_transport, address, self._details(hello.num_blocks * hello.layout.block_bytes))
        said = PeerHello(
            node_id=chance.choice(("liar", hello.node_id)),
            epoch=chance.getrandbits(63),
            sender_epoch=self._known.peer_epoch,
            fingerprint=hello.fingerprint,
            layout=hello.layout,
            num_blocks=chance.choice((0, 1, hello.num_blocks, 2**40)),
            checksum="xxh3",
            process=ProcessIdentity("", 1, 1),
            endpoints=(endpoint,),
        )
        return [RECEIVER_TO_SENDER.encode(said)]

    def _details(self, num_bytes: int) -> bytes:
        chance = self.chance
        if self._kv_transport != "nixl":
            return b""
        metadata = chance.randbytes(chance.choice((0, 8, 400)))
        pool = PoolDetails(metadata, chance.choice((4096, 0, 2**63)), num_bytes, chance.choice(("DRAM", "VRAM")), 0)
        return chance.choice((DETAILS.encode(pool), DETAILS.encode(pool), chance.randbytes(40), b""))

    def frames(self) -> list[bytes]:
        chance = self.chance
        if chance.random() < 0.4:
            return super().frames()
        name = HandoffName(chance.randbytes(16), 1)
        num_blocks = chance.choice((0, 1, 3))
        blocks = tuple(chance.randrange(2**32) for _ in range(num_blocks))
        grant = Grant(
            handoff=name,
            receiver_epoch=chance.getrandbits(63),
            sender_epoch=self._known.peer_epoch,
            num_tokens=chance.choice((0, 5, 2**40)),
            num_cached_tokens=0,
            prompt_digest=bytes(16),
            block_ids=blocks,
            generations=blocks,
        )
        message = chance.choice((grant, Revoke(name), Release(name), Renew((name,) * chance.choice((0, 1, 1000)))))
        return [RECEIVER_TO_SENDER.encode(message)]


class LyingNode(Frames):
    """An insider that registers as a decode node for which no request is small enough, and then says what it likes."""

    def __init__(self, address: str, settings: LinkSettings, known: Knowledge, seed: int) -> None:
        super().__init__("insider at the router", zmq.DEALER, address, settings, TO_ROUTER, seed)
        self._known = known
        self._hello = known.hello
        self._session, self._sent = 0, 0
        self.num_welcomes = 0

    def identity(self) -> bytes:
        chance = self.chance
        self._session = self._sent = 0
        self._hello = replace(
            self._known.hello,
            node_id=f"liar-{chance.randrange(3)}",
            epoch=chance.getrandbits(63),
            max_request_tokens=1,
            max_num_seqs=chance.choice((1, 1000)),
            session=0,
            role=DECODE,
        )
        return control_identity(self._hello.epoch)

    def hear(self, frames: Sequence[bytes]) -> None:
        message = ROUTER_TO_NODE.decode(frames[-1])
        if isinstance(message, Welcome) and message.session != self._session:
            self._session, self._sent = message.session, 0
            self.num_welcomes += 1

    def first(self) -> list[bytes]:
        return [NODE_TO_ROUTER.encode(self._hello)]

    def frames(self) -> list[bytes]:
        chance, epoch = self.chance, self._hello.epoch
        if chance.random() < 0.3:
            return super().frames()
        event = TokenEvent(chance.randbytes(16), 1, chance.randrange(9), (66,) * chance.randrange(9), (), "", 0)
        hashes = chance.randbytes(16 * chance.choice((0, 1, 4096)))
        message = chance.choice(
            (
                Tokens(epoch, (event,) * chance.choice((0, 1, 500))),
                Failed(chance.randbytes(16), 1, "overloaded", "x" * 1000),
                CacheEvents(epoch, chance.random() < 0.5, hashes, hashes),
                Pong(self._session or 1, 2**64 - 1, 2**64 - 1, chance.randbytes(20 * chance.choice((0, 1000)))),
                Resume(self._session or 1, chance.choice((0, 1, 2**64 - 1))),
                Heartbeat(epoch, self._hello.status),
                replace(self._hello, epoch=epoch, num_blocks=chance.choice((0, 2**40))),
                Leaving(epoch),
            )
        )
        frame = NODE_TO_ROUTER.encode(message)
        if not isinstance(message, Tokens | Failed | CacheEvents | Leaving):
            return [frame]
        if chance.random() < 0.1:
            return [chance.randbytes(8), frame]
        self._sent += 1
        return [(self._session + self._sent).to_bytes(8, "little"), frame]


class Blocks(Frames):
    """At a decode node's data port: headers of every kind, with frames that are no blocks of anything."""

    def __init__(self, name: str, address: str, settings: LinkSettings, seed: int) -> None:
        super().__init__(name, zmq.PUSH, address, settings, _DATA, seed)

    def identity(self) -> bytes:
        return b""

    def frames(self) -> list[bytes]:
        chance = self.chance
        payload = [chance.randbytes(chance.choice((0, 1, 4096, 65536))) for _ in range(chance.randrange(4))]
        return [*super().frames()[:1], *payload]


def _odd_json(chance: random.Random) -> Any:
    value = odd(chance)
    with suppress(TypeError, ValueError):
        json.dumps(value)
        return value
    return chance.choice(("(a+)+$", {"type": "json_schema"}, [1] * 10_000, {"a": {"b": {"c": []}}}, "\ud800"))
