"""`baton rank`: the ranks of a node that run on this machine, while the node's driver runs on another.

One command starts all of them. It stays when the driver ends, and serves the next one that listens there.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import zmq

from baton.ranks.machines.link import Offer
from baton.ranks.machines.rank_host import RankHost, Stop
from baton.ranks.settings import RankSettings
from baton.runtime.command_line import CommandParser
from baton.runtime.events import Ready, emit
from baton.runtime.exit_status import report_errors
from baton.runtime.process import configure_logging, pin_to_cores
from baton.runtime.settings import add_flags, check_file_keys, resolve
from baton.runtime.watchdog import Watchdog
from baton.wire import links
from baton.wire.errors import InvalidSetting
from baton.wire.keys import KeyRing, own_role

_STANDSTILL_S = 60.0
"""Its driver has given this machine up long before."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ranks until told to stop; the exit status."""
    parser = CommandParser(prog="baton rank", description="Run the ranks of a node that are on this machine.")
    add_flags(parser, RankSettings)
    flags = parser.parse(argv)

    def run() -> None:
        if flags.config:
            check_file_keys(flags.config, RankSettings)
        _serve(resolve(RankSettings, flags))

    return report_errors(run)


def _serve(settings: RankSettings) -> None:
    if not settings.driver:
        raise InvalidSetting("--driver HOST:PORT: where the driver of the node waits for this machine")
    address = links.parse_address(settings.driver, "--driver")
    configure_logging(settings.log_level, settings.log_format)
    if settings.cpu_affinity:
        pin_to_cores(settings.cpu_affinity)
    key = None
    if settings.cluster_key:
        path = Path(settings.cluster_key)
        role = own_role(path)
        key = KeyRing(path, role).towards(role)
    links.require_key_beyond_loopback(settings.host, key)
    offer = Offer(
        settings.host,
        settings.model,
        settings.num_threads or len(os.sched_getaffinity(0)),
        settings.trust_remote_code,
    )
    stop = Stop()

    def on_signal(number: int, frame: FrameType | None) -> None:
        # the second one: now
        stop.by_s = 0.0 if stop.is_asked else time.monotonic() + settings.shutdown_timeout_s
        stop.is_asked = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    watchdog = Watchdog()
    try:
        watchdog.start(_STANDSTILL_S)
        emit(Ready("rank", ""))
        RankHost(offer, settings.cluster_key, address, context, links.LinkSettings(key)).run(stop)
    finally:
        watchdog.close()
        context.destroy(linger=0)


if __name__ == "__main__":
    sys.exit(main())
