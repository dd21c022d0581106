"""What is below the small KV pools of a campaign's nodes: host memory of each, a folder, and perhaps a server.

Owns the folder and the server, which all nodes share, and a link to the server that can be broken, which is that of
decode nodes. All are so small that blocks go from each tier to the next all the time, and computing a prompt takes so
many steps that loading it is mostly sooner.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.campaign.proxy import LinkProxy
from tests.campaign.stalled_disk import stalls_of
from tests.engine.cache.valkey_servers import RunningServer

_GIB = 2**30
_CHUNK = 32
_HOST_BYTES = 2**19
_DISK_BYTES = 2**20
_MORE_BYTES = 2**21
"""Nodes that write at the same time do not see each other's files before; and each may leave one that is unfinished."""


class KvTiers:
    """See the module. `link` leads to `server`, if there is one."""

    def __init__(self, folder: Path, *, has_server: bool) -> None:
        self.folder = folder
        for each in (folder, stalls_of(folder)):
            each.mkdir(parents=True, exist_ok=True)
        self.server = RunningServer() if has_server else None
        self.link = LinkProxy(0 if self.server is None else self.server.port)

    def flags(self, role: str) -> Sequence[str]:
        """Those of a node. To be asked when it was started."""
        flags = ["--max-num-batched-tokens", f"{_CHUNK}", "--kv-offloading-size", f"{_HOST_BYTES / _GIB}"]
        flags += ["--kv-disk", str(self.folder), "--kv-disk-size", f"{_DISK_BYTES / _GIB}"]
        if self.server is not None:
            port = self.link.port if role == "decode" else self.server.port
            flags += ["--kv-store", "valkey", "--kv-store-url", f"redis://127.0.0.1:{port}/0"]
        return flags

    def files(self) -> list[Path]:
        """The files of blocks that there are."""
        return sorted(self.folder.glob("*/*.kv"))

    def findings(self) -> list[str]:
        """What must not be."""
        num_bytes = sum(file.stat().st_size for file in self.files())
        return [f"the folder of KV blocks has {num_bytes} bytes"] if num_bytes > _DISK_BYTES + _MORE_BYTES else []

    async def start(self) -> None:
        """Lead to the server."""
        await self.link.start()

    async def close(self) -> None:
        """End the server."""
        await self.link.close()
        if self.server is not None:
            self.server.client.close()
            self.server.kill()
