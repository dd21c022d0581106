"""NIXL alone, without Baton: what its transport can be held against. `python -m bench.kv.bare_nixl`.

Owns one agent over a registered segment. One of two such processes writes blocks into the other's segment with the
descriptors prepared beforehand and asks for the write's state without a pause; the other asks for notices without a
pause until one comes. That is the fastest that two agents are on two cores, and takes both of them.
"""

from __future__ import annotations

import base64
import os
import secrets
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.child import serve_parent
from kvtransfer.transports.nixl.ucx import ucx_environment
from wire.errors import RequestFailed

_HOST = "127.0.0.1"
_WAIT_S = 60.0
_LOCAL = "NIXL_INIT_AGENT"


class BareAgent:
    """An agent and its blocks. See `bench.child.Worker`."""

    def __init__(self, spec: dict[str, Any]) -> None:
        os.environ.update({"NIXL_LOG_LEVEL": "WARN", **ucx_environment(_HOST, os.environ)})
        # reads the environment, and takes seconds
        from nixl import nixl_agent, nixl_agent_config

        self._num_blocks, self._block_bytes = spec["num_blocks"], spec["block_bytes"]
        self._memory = np.ones(self._num_blocks * self._block_bytes, dtype=np.uint8)
        self._address = int(self._memory.ctypes.data)
        config = nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._nixl: Any = nixl_agent(secrets.token_hex(16), config)
        region = np.array([[self._address, self._memory.nbytes, 0]], dtype=np.uint64)
        self._nixl.register_memory(region, "DRAM")
        self._sources = self._nixl.prep_xfer_dlist(_LOCAL, self._descriptors(self._address), "DRAM")
        self._targets: Any = None

    def details(self) -> dict[str, Any]:
        """What the other one needs to write here; the arguments of `connect`."""
        return {"metadata": base64.b64encode(self._nixl.get_agent_metadata()).decode(), "address": self._address}

    def connect(self, metadata: str, address: int) -> None:
        """Prepare to write into another agent's blocks."""
        name = self._nixl.add_remote_agent(base64.b64decode(metadata))
        self._targets = self._nixl.prep_xfer_dlist(name, self._descriptors(address), "DRAM")

    def write(self, first: int, count: int) -> float:
        """Seconds from the making of a write to its end."""
        ids = np.arange(first, first + count, dtype=np.int32)
        begin_s = time.monotonic()
        handle = self._nixl.make_prepped_xfer("WRITE", self._sources, ids, self._targets, ids, b"landed")
        state = self._nixl.transfer(handle)
        while state == "PROC" and time.monotonic() - begin_s < _WAIT_S:
            state = self._nixl.check_xfer_state(handle)
        taken_s = time.monotonic() - begin_s
        handle.release()
        if state != "DONE":
            raise RequestFailed(f"a bare write ended as {state}")
        return taken_s

    def wait_for_notice(self) -> None:
        """Until a write of the other one has arrived."""
        deadline_s = time.monotonic() + _WAIT_S
        while not self._nixl.get_new_notifs():
            if time.monotonic() > deadline_s:
                raise RequestFailed("a bare write did not arrive")

    def close(self) -> None:
        """See `Worker`: the process ends, and the agent with it."""

    def _descriptors(self, address: int) -> npt.NDArray[np.uint64]:
        found = np.zeros((self._num_blocks, 3), dtype=np.uint64)
        found[:, 0] = address + np.arange(self._num_blocks, dtype=np.uint64) * np.uint64(self._block_bytes)
        found[:, 1] = self._block_bytes
        return found


if __name__ == "__main__":
    serve_parent(BareAgent)
    # no destructors: nixl's could wait for a peer that has gone
    os._exit(0)
