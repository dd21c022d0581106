"""Opens the receiving side of a node: its connections and its thread.

Owns nothing afterwards: the leg that uses it posts commands and takes notices, and who opened it closes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import zmq

from baton.kvtransfer.commands import ReceivingCommand, ReceivingNotice
from baton.kvtransfer.facts import ReceivingFacts
from baton.kvtransfer.incoming_handoffs import ReceivingCounters
from baton.kvtransfer.mailbox import Mailbox, Takeable
from baton.kvtransfer.pools.base import HashedPool
from baton.kvtransfer.receiver_connections import ReceiverConnections
from baton.kvtransfer.receiving import ReceivingSide
from baton.kvtransfer.thread import TransferThread
from baton.kvtransfer.transports.base import Receiver
from baton.runtime.watchdog import Beat
from baton.wire import links


@dataclass(frozen=True, slots=True)
class ReceivingEnd:
    """A receiving side with the `thread` that runs it, and the mailbox of its notices."""

    side: ReceivingSide
    thread: TransferThread[ReceivingCommand]
    notices: Takeable[ReceivingNotice]

    def close(self) -> None:
        """End the thread and close connections."""
        self.thread.close()
        self.notices.close()


def open_receiving_end(
    facts: ReceivingFacts,
    context: zmq.Context[zmq.Socket[bytes]],
    settings: links.LinkSettings,
    receivers: Sequence[Receiver],
    pool: HashedPool,
    beat: Beat,
    counters: ReceivingCounters,
) -> ReceivingEnd:
    """A running receiving side over `pool`, into which `receivers` write. Its thread touches `beat`, and it counts in
    `counters`."""
    notices: Mailbox[ReceivingNotice] = Mailbox()
    connections = ReceiverConnections(facts, context, settings, receivers)
    side = ReceivingSide(facts, connections, pool, notices, counters=counters)
    thread = TransferThread(side, "kv-receiving", pool.enter, beat)
    thread.start()
    return ReceivingEnd(side, thread, notices)
