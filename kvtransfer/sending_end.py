"""Opens the sending side of a node: its listener, its pusher and its thread. Every node that hands KV over has one.

Owns nothing afterwards: the leg that uses it posts commands and takes notices, and who opened it closes it.
"""

from __future__ import annotations

from dataclasses import dataclass

import zmq

from baton.kvtransfer.commands import SendingCommand, SendingNotice
from baton.kvtransfer.facts import SendingFacts
from baton.kvtransfer.mailbox import Mailbox, Takeable
from baton.kvtransfer.pools.base import HashedPool
from baton.kvtransfer.pusher import Pusher
from baton.kvtransfer.sender_connections import SenderOpener, open_listener
from baton.kvtransfer.sending import SendingCounters, SendingSide
from baton.kvtransfer.thread import TransferThread
from baton.runtime.watchdog import Beat
from baton.wire import links


@dataclass(frozen=True, slots=True)
class SendingEnd:
    """A sending side with the `thread` that runs it, and the mailbox of its notices."""

    side: SendingSide
    thread: TransferThread[SendingCommand]
    notices: Takeable[SendingNotice]

    def close(self) -> None:
        """End the thread and close connections."""
        self.thread.close()
        self.notices.close()


@dataclass(frozen=True, slots=True)
class ListenAt:
    """The address at which receivers dial a sending side. `port` 0: the system chooses it."""

    context: zmq.Context[zmq.Socket[bytes]]
    host: str
    port: int
    links: links.LinkSettings


def open_sending_end(
    facts: SendingFacts,
    at: ListenAt,
    senders: SenderOpener,
    pool: HashedPool,
    beat: Beat | None = None,
    counters: SendingCounters | None = None,
) -> tuple[SendingEnd, str]:
    """A running sending side over `pool`, and the address at which it listens. Its thread touches `beat`, and it counts
    in `counters`. Raises `InvalidSetting`."""
    link, address = open_listener(at.context, at.host, at.port, at.links)
    notices: Mailbox[SendingNotice] = Mailbox()
    side = SendingSide(facts, link, senders, Pusher(pool, facts.checksum), notices, counters=counters)
    thread = TransferThread(side, "kv-sending", pool.enter, beat)
    thread.start()
    return SendingEnd(side, thread, notices), address
