"""Settings that every node has, whatever leg it runs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from baton.engine.settings import EngineSettings
from baton.runtime.plugins import KV_TRANSPORTS
from baton.runtime.process import LOG_FORMATS
from baton.runtime.ranges import MILLISECONDS, PORT, SECONDS_OR_NONE, Range
from baton.runtime.settings import setting
from baton.wire import links
from baton.wire.errors import InvalidSetting
from baton.wire.messages.membership import BOTH, DECODE, PREFILL

MAX_ROUTERS = 16
MAX_ENGINES = 256
LOG_LEVELS = ("debug", "info", "warning", "error")
_ranks = partial(setting, group="ranks")
_transfer = partial(setting, group="transfer")
_kernels = partial(setting, group="kernels")
_access = partial(setting, group="access")
_lifetime = partial(setting, group="lifetime")
_logging = partial(setting, group="logging")


@dataclass(frozen=True, slots=True)
class NodeSettings(EngineSettings):
    """The settings of a node: those of its engine, and its place in a deployment."""

    router: str = setting(
        "tcp://127.0.0.1:8001",
        "control address of the router, as it prints it; of each router, with commas, if this node serves several",
        metavar="ADDRESS[,ADDRESS...]",
    )
    host: str = setting("127.0.0.1", "address this node listens on; beyond loopback a cluster key is needed")
    port: int = setting(
        0,
        "port for other nodes; a decode node has one for each transport that listens, from this one on, and hands "
        "requests over on the next; 0: chosen by the system",
        allowed=PORT,
    )
    rank_port: int = _ranks(
        0,
        "port at which a node with --rank-machines waits for `baton rank`; 0: chosen by the system, and logged",
        allowed=PORT,
    )
    http_port: int = _logging(0, "port of /health and /metrics; 0: chosen by the system", allowed=PORT)
    node_id: str = setting("", "name of this node, kept over its restarts; empty: a random one")
    node_group: str = _lifetime("", "name of the nodes with which this one is counted and drained; empty: none")
    data_parallel_size: int = _ranks(
        1,
        "engines of a group: one command starts so many nodes, NAME-0, NAME-1, ..., and NAME drains them all",
        short="-dp",
        allowed=Range(1, MAX_ENGINES),
    )
    kv_transport: str = _transfer(
        "auto",
        "how KV travels between nodes; NAME: by the transport of an installed package, where both nodes have it",
        choices=("auto", "shm", "zmq", "nixl", "nccl"),
        plugins=KV_TRANSPORTS,
    )
    kv_checksum: str = _transfer(
        "auto",
        "checksum over every KV block that travels; auto: xxh3 for KV in host memory, dot64 on a device",
        choices=("auto", "xxh3", "dot64", "none"),
    )
    lease_s: float = _transfer(
        10.0, "seconds after which blocks held for a silent peer are released", allowed=Range(0.1, 86_400)
    )
    enable_prefix_pulls: bool = _transfer(
        True,
        "copy prefixes of prompts from nodes that have them cached, and lend them; of use where the router chooses "
        "nodes of both roles by prefix",
    )
    kv_events_config: str = setting(
        "",
        "tell routers and indexers what the prefix cache holds, as vLLM's JSON; "
        '{"enable_kv_cache_events": true, "endpoint": "tcp://HOST:PORT", "replay_endpoint": "tcp://HOST:PORT", '
        '"topic": "kv@POD@MODEL"}: batches there, and what was missed; HOST *: every interface, not encrypted',
        metavar="JSON",
        group="cache",
    )
    cpu_affinity: str = _kernels("", "cores this process may use, for example 0 or 2,3; empty: all")
    max_rest_ms: float = _kernels(
        20.0,
        "most milliseconds that a decode node rests after a step while a prefill node computes on its cores, if they "
        "lend each other cores; 0: it never does",
        allowed=MILLISECONDS,
    )
    cluster_key: str = _access("", "file with the deployment's or this role's key, read again on SIGHUP (`baton key`)")
    shutdown_timeout_s: float = _lifetime(
        30.0, "seconds that running requests get to finish after SIGTERM", allowed=SECONDS_OR_NONE
    )
    hang_timeout_s: float = _lifetime(
        300.0, "seconds after which a step that does not end ends the node; 0: never", allowed=SECONDS_OR_NONE
    )
    log_level: str = _logging("info", "how much is logged to stderr", choices=LOG_LEVELS)
    log_format: str = _logging("text", "lines for people, or one JSON object per line", choices=LOG_FORMATS)

    @property
    def router_addresses(self) -> tuple[str, ...]:
        """The addresses of all routers. Raises `InvalidSetting`."""
        addresses = tuple(links.parse_address(each.strip(), "--router") for each in self.router.split(","))
        if len(set(addresses)) < len(addresses):
            raise InvalidSetting(f"--router {self.router!r:.200} names an address twice")
        if len(addresses) > MAX_ROUTERS:
            raise InvalidSetting(f"--router names {len(addresses)} routers: a node serves {MAX_ROUTERS} at most")
        return addresses


@dataclass(frozen=True, slots=True)
class MixedNodeSettings(NodeSettings):
    """The settings of every node, and the legs that this one prefers."""

    role: str = setting(
        BOTH, "the legs that the node is given where there is a choice; it can do any", choices=(PREFILL, DECODE, BOTH)
    )
