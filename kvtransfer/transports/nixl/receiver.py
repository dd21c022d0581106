"""D's side of the nixl transport: the endpoint of its agent's life, and what has arrived by way of it.

Owns what grants announced and which endpoint is offered. What ends a write, and when, is in the folder's description.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from baton.kvtransfer.messages import Endpoint, ProcessIdentity
from baton.kvtransfer.transports.announced import AnnouncedBlocks, Look
from baton.kvtransfer.transports.base import BlocksArrived
from baton.kvtransfer.transports.inlets import Inlets
from baton.kvtransfer.transports.nixl.lives import RunningAgent
from baton.kvtransfer.transports.nixl.ucx import may_use_cuda_ipc
from baton.kvtransfer.transports.nixl.wire import DETAILS, NAME, NOTICES, Landed, Notices, Ready, Watch
from baton.kvtransfer.write_proof import WriteProof
from baton.wire.errors import BatonError
from baton.wire.request_key import RequestKey


class NixlReceiver:
    """Offers the pool that `agent` has registered to peers, who write into it. Closes the agent with itself.

    `inlets`: which ranks of a sender have parts of a block. `num_refused` counts notices of blocks that no grant
    announced, `num_bytes` what notices have told, `num_crashes` agents that ended by themselves.
    """

    write_proof = WriteProof.ENDPOINT_ENDED
    is_silent = False

    def __init__(self, agent: RunningAgent, inlets: Inlets) -> None:
        self.num_refused = self.num_bytes = 0
        self._inlets = inlets
        self._announced = AnnouncedBlocks()
        self._expected: set[RequestKey] = set()
        self._agent = agent
        self._endpoint = _endpoint(agent.ready)

    @property
    def is_ready(self) -> bool:
        """Whether an agent runs."""
        return self._agent.ready is not None

    @property
    def endpoint(self) -> Endpoint:
        """The agent's name and what others need to reach it; without details while there is none."""
        return self._endpoint

    @property
    def num_crashes(self) -> int:
        """The number of agents that ended by themselves."""
        return self._agent.num_crashes

    @property
    def process(self) -> ProcessIdentity | None:
        """The agent process; none while it starts again."""
        return None if self._agent.ready is None else self._agent.ready.process

    def wait_on(self) -> Sequence[Any]:
        """The socket of the agent."""
        return self._agent.wait_on()

    def expect(self, key: RequestKey, block_ids: Sequence[int], generations: Sequence[int]) -> None:
        """Accept these blocks of a grant. The agent watches for notices while any handoff is expected."""
        if not self._expected:
            self._agent.send(Watch(True))
        self._expected.add(key)
        self._announced.expect(key, block_ids, generations)

    def look_by(self, look: Look) -> None:
        """Set what is called when something comes for a handoff that is not known here."""
        self._announced.look = look

    def is_writing(self, key: RequestKey) -> bool:
        """False: peers write, and never this side."""
        return False

    def forget(self, key: RequestKey) -> None:
        """Accept no blocks for this handoff any more. The agent stops watching with the last one."""
        self._announced.forget(key)
        self._expected.discard(key)
        if not self._expected:
            self._agent.send(Watch(False))

    def poll(self) -> None:
        """Take the agent's notices of finished writes. A dead agent is noticed and replaced here."""
        for report in self._agent.poll():
            if isinstance(report, Ready):
                self._agent.send(Watch(bool(self._expected)))
            elif isinstance(report, Notices):
                for notice in report.notices:
                    self._take(notice)
        self._look_at_endpoint()

    def take_arrivals(self) -> Sequence[BlocksArrived]:
        """The blocks that have arrived since the last call."""
        return self._announced.take_arrivals()

    def fence(self) -> bool:
        """End the agent. True once it has ended: the next one is up, and the endpoint complete, some seconds later.

        The proof, by the way the bytes take. RDMA: its registration is gone with the process, the device refuses the
        key. Copies between processes: the process they name is gone. TCP and queues: it was this process that put the
        bytes in place. The new agent has a new name and knows no old connection.
        """
        if not self._agent.is_starting:  # nobody has been told about one that is
            self._agent.kill()
        self._look_at_endpoint()
        return self._agent.is_starting or not self._agent.is_alive

    def close(self) -> None:
        """End the agent."""
        self._agent.close()
        self._endpoint = _endpoint(None)

    def _look_at_endpoint(self) -> None:
        """Another endpoint says that the life behind the old one has ended: one that is ending keeps its own."""
        is_ending = self._agent.is_alive and self._agent.ready is None and not self._agent.is_starting
        if not is_ending:
            self._endpoint = _endpoint(self._agent.ready)

    def _take(self, notice: bytes) -> None:
        try:
            landed: Landed = NOTICES.decode(notice)
        except BatonError:
            self.num_refused += 1
            return
        key, first_index, inlet = landed.handoff.key, landed.first_index, self._inlets.of(landed.source)
        if inlet is None or not self._announced.may_write(
            key, first_index, landed.block_ids, landed.generations, inlet.source
        ):
            self.num_refused += 1
            return
        self.num_bytes += len(landed.block_ids) * inlet.sink.block_bytes
        self._announced.arrived(key, first_index, len(landed.block_ids), inlet.source, inlet.sources)


class NixlDeviceReceiver(NixlReceiver):
    """The same for a pool on a GPU. See the folder's description for what ends a write into a GPU's memory.

    `poll` raises `TransferFailed` when the agent can no longer be ended: the node must not go on.
    """

    def __init__(self, agent: RunningAgent, inlets: Inlets) -> None:
        super().__init__(agent, inlets)
        is_mapped = may_use_cuda_ipc(os.environ)
        self.write_proof = WriteProof.BOTH_ENDED if is_mapped else WriteProof.ENDPOINT_ENDED

    def fence(self) -> bool:
        """End the agent, and its registration with it. True when that stops every peer.

        False where a peer may hold a mapping of its own, which it does not stop. The agent has ended all the same, and
        the endpoint changes.
        """
        return super().fence() and self.write_proof is WriteProof.ENDPOINT_ENDED


def _endpoint(ready: Ready | None) -> Endpoint:
    if ready is None:
        return Endpoint(NAME, "starting")
    return Endpoint(NAME, ready.agent_name, DETAILS.encode(ready.details))
