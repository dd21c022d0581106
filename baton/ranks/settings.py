"""Settings of `baton rank`: what a machine that runs ranks of a node knows by itself. All else is the driver's."""

from __future__ import annotations

from dataclasses import dataclass

from baton.runtime.process import LOG_FORMATS
from baton.runtime.ranges import SECONDS_OR_NONE, THREADS
from baton.runtime.settings import setting


@dataclass(frozen=True, slots=True)
class RankSettings:
    """The place of a machine in its node."""

    model: str = setting(
        "", "this machine's path or hub id of the driver's checkpoint; empty: the built-in demo model", positional=True
    )
    driver: str = setting(
        "", "address at which the driver waits for machines: its --host and --rank-port", metavar="HOST:PORT"
    )
    host: str = setting(
        "127.0.0.1", "address of this machine at which its ranks listen for ranks of others, and for other nodes"
    )
    trust_remote_code: bool = setting(
        False, "run code that comes with the checkpoint, where the driver does: both have to allow it"
    )
    num_threads: int = setting(
        0, "compute threads of all ranks here; 0: one per core this process may use", allowed=THREADS
    )
    cpu_affinity: str = setting("", "cores this process and its ranks may use, for example 0 or 2,3; empty: all")
    cluster_key: str = setting("", "file with the deployment's key, or with that of the node's role (`baton key`)")
    shutdown_timeout_s: float = setting(
        60.0,
        "seconds after SIGTERM in which the driver may finish what it has; without a driver it ends at once",
        allowed=SECONDS_OR_NONE,
    )
    log_level: str = setting("info", "how much is logged to stderr", choices=("debug", "info", "warning", "error"))
    log_format: str = setting("text", "lines for people, or one JSON object per line", choices=LOG_FORMATS)
