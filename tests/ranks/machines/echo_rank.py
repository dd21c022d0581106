"""A rank without an engine: says `Here`, then takes the ends of two lines and says back what comes by the first.

Started as `baton.ranks` is. Ends when its driver is gone, or tells it to stop.
"""

from __future__ import annotations

import socket
import sys

from baton.ranks.executor.messages import Channel, Compute, Failed, Here, Stop
from baton.runtime.channel import ChannelBroken


def main(descriptor: str) -> None:
    channel = Channel(socket.socket(fileno=int(descriptor)), "the driver")
    try:
        channel.receive(30.0)
        channel.send(Here(), 5.0)
        lines = [socket.socket(fileno=channel.take_descriptor()) for _ in range(2)]
        while not isinstance(order := channel.receive(None), Stop):
            if isinstance(order, Compute):
                lines[1].sendall(lines[0].recv(1000, socket.MSG_WAITALL))
                channel.send(Failed(f"{len(order.token_ids)} bytes", False), 5.0)
    except ChannelBroken:
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
