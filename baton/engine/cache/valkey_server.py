"""A Valkey or Redis server on which nodes keep KV blocks: its address, its keys and values, and what its errors mean.

Owns how a block is written down, and how much of a value is read. Knows no threads, no loads and no requests; its calls
wait for the server, `TIMEOUT_S` for each answer at most, and come from any thread.

A key names the format, the kind of blocks and the block. A value is a header and the bytes of the block. Whoever may
write there can replace both and the checksum: the server belongs to those who run the nodes.

Invariants:
- of a value no more is read than a block has, whatever lies there;
- what is no block of this kind is not given, and is removed;
- no message has what the server said, or what the address has beside its host: either may have the password.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from baton.engine.cache.store import BlockKind, StoredBlock
from baton.wire.errors import InvalidSetting

if TYPE_CHECKING:
    from valkey import Valkey

TIMEOUT_S = 0.5
_VERSION = 1
_HEADER = Struct("<4sQQ")
_MAGIC = b"BKV%d" % _VERSION
_TLS_SCHEMES = ("rediss", "valkeys")
_NOBODYS_HASH = bytes(16)
_NO_PACKAGE = "--kv-store valkey needs a client: pip install 'baton-serve[valkey]'"
_NO_ADDRESS = (
    "--kv-store-url is no address of a server such as redis://HOST:6379/0 or rediss://USER:PASSWORD@HOST:6379/0; it is "
    "not shown, because it may have a password"
)


class ServerFault(Exception):
    """The server cannot be used now: it is gone, or slow, or does not let this node in."""


class Fetched(NamedTuple):
    """What the server had of some blocks, each in its place; None: no block of this kind, of which `num_damaged` have
    something else in their place."""

    blocks: Sequence[StoredBlock | None]
    num_damaged: int


class ValkeyServer:
    """Blocks of `kind` on the server behind `client`. `name`: what messages call it."""

    def __init__(self, client: Valkey, kind: BlockKind, name: str) -> None:
        self.name = name
        self.kind = kind
        self._client = client
        self._prefix = f"baton:kv:{_VERSION}:{kind.digest.hex()}:".encode()

    def fetch(self, hashes: Sequence[bytes]) -> Fetched:
        """What the server has of these blocks. Raises `ServerFault`."""
        # one byte more than a block has, so that a longer value is known by its length
        last = _HEADER.size + self.kind.block_bytes
        values = self._asked([("GETRANGE", self._key(each), 0, last) for each in hashes])
        found = [self._block(each, value) for each, value in zip(hashes, values, strict=True)]
        damaged = [each for each, value, block in zip(hashes, values, found, strict=True) if value and block is None]
        if damaged:
            self.remove(damaged)
        return Fetched(found, len(damaged))

    def keep(self, values: Mapping[bytes, memoryview]) -> list[str]:
        """Keep these blocks (see `encoded`), unless they are there; those are used by that. Why each that was refused
        was. Raises `ServerFault`."""
        there = self._asked([("TOUCH", self._key(each)) for each in values])
        missing = [each for each, is_there in zip(values, there, strict=True) if is_there != 1]
        answers = self._asked([("SET", self._key(each), values[each]) for each in missing])
        return [_reason(answer) for answer in answers if isinstance(answer, Exception)]

    def remove(self, hashes: Sequence[bytes]) -> None:
        """Keep these blocks no longer. Raises `ServerFault`."""
        self._asked([("UNLINK", self._key(each)) for each in hashes])

    def probe(self) -> None:
        """Ask for a block that nobody has. Raises `ServerFault`."""
        self.fetch([_NOBODYS_HASH])

    def close(self) -> None:
        """Close all connections; calls that wait end with `ServerFault`."""
        self._client.connection_pool.disconnect()

    def _key(self, block_hash: bytes) -> bytes:
        return self._prefix + block_hash.hex().encode()

    def _asked(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The answers to some commands, which travel together; an error of one of them is its answer."""
        from valkey.exceptions import ValkeyError

        pipeline = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        try:
            return list(pipeline.execute(raise_on_error=False))
        except (ValkeyError, OSError, ValueError) as error:  # the last: bytes that are no answer
            raise ServerFault(_reason(error)) from None

    def _block(self, block_hash: bytes, value: Any) -> StoredBlock | None:
        if isinstance(value, Exception):
            if not str(value).startswith("WRONGTYPE"):
                raise ServerFault(_reason(value))
            return None
        return decoded(block_hash, value, self.kind)


def encoded(block: StoredBlock) -> memoryview:
    """The value of a block, which is a copy."""
    value = np.empty(_HEADER.size + block.content.nbytes, dtype=np.uint8)
    _HEADER.pack_into(value.data, 0, _MAGIC, block.content.nbytes, block.checksum)
    value[_HEADER.size :] = block.content
    return value.data


def decoded(block_hash: bytes, value: bytes | memoryview, kind: BlockKind) -> StoredBlock | None:
    """The block of a value. None: it is none of this kind. Its checksum is looked at by whoever takes it."""
    if len(value) != _HEADER.size + kind.block_bytes:
        return None
    magic, num_bytes, checksum = _HEADER.unpack_from(value)
    if magic != _MAGIC or num_bytes != kind.block_bytes:
        return None
    return StoredBlock(block_hash, checksum, np.frombuffer(value, dtype=np.uint8, offset=_HEADER.size))


def server_at(url: str) -> Callable[[BlockKind], ValkeyServer]:
    """What makes the server at an address one for a kind of blocks. Nothing is connected yet. Raises
    `InvalidSetting`."""
    client_class = _client_class()
    try:
        parts = urlsplit(url)
        name = f"{parts.scheme}://{parts.hostname or ''}:{parts.port or 6379}"
        # options of the address win over these
        options: dict[str, Any] = {"socket_timeout": TIMEOUT_S, "socket_connect_timeout": TIMEOUT_S}
        if parts.scheme in _TLS_SCHEMES:
            options["ssl_check_hostname"] = True
        client = client_class.from_url(url, **options)
        client.connection_pool.make_connection()  # finds options that there are not
    except (ValueError, TypeError):
        raise InvalidSetting(_NO_ADDRESS) from None
    return lambda kind: ValkeyServer(client, kind, name)


def _client_class() -> Any:
    try:
        from valkey import Valkey
    except ImportError:
        raise InvalidSetting(_NO_PACKAGE) from None
    return Valkey


def _reason(error: Exception) -> str:
    """What kind of error it is. Servers repeat what they were sent, so of their words only a leading code is shown."""
    code = str(error).partition(" ")[0]
    return f"{type(error).__name__} {code}" if code.isupper() else type(error).__name__
