"""`baton prefill`, `decode` and `node`: one node, or with `--data-parallel-size N` a group of N of them.

Owns what the nodes of a group have of their own: their names, ports and shares of this machine. To a router each is a
node like any other; what makes a group of them is its name, by which they are counted and drained, and the process that
starts them, keeps them running and ends them together. It ends when all of them were drained.
"""

from __future__ import annotations

import importlib
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from baton.launch.console import Console
from baton.launch.placement import VISIBLE_DEVICES, placed, shares_of
from baton.launch.settings import child_environment
from baton.launch.supervised import ChildSpec
from baton.launch.supervisor import Supervisor
from baton.node.kv_events.config import of_node
from baton.node.settings import MixedNodeSettings, NodeSettings
from baton.runtime.command_line import CommandParser
from baton.runtime.events import Ready, emit
from baton.runtime.settings import add_flags, as_flags, check_file_keys, resolve, secret_environment
from baton.wire.messages.membership import DECODE, PREFILL

START_TIMEOUT_S = 1800.0
STOP_MARGIN_S = 2.0
PORTS_OF_A_NODE = 8
"""Between the ports of two nodes: one has a port for each transport that listens, and one for what it hands over."""


def prefill(arguments: Sequence[str]) -> int:
    """`baton prefill`; its exit status. Raises `BatonError`."""
    return _run(PREFILL, "baton.prefill_node", NodeSettings, arguments)


def decode(arguments: Sequence[str]) -> int:
    """`baton decode`; its exit status. Raises `BatonError`."""
    return _run(DECODE, "baton.decode_node", NodeSettings, arguments)


def mixed(arguments: Sequence[str]) -> int:
    """`baton node`; its exit status. Raises `BatonError`."""
    return _run("node", "baton.node", MixedNodeSettings, arguments)


def _run(name: str, module: str, settings_class: type[Any], arguments: Sequence[str]) -> int:
    what = "node" if name == "node" else f"{name} node"
    parser = CommandParser(prog=f"baton {name}", description=f"Run one {what}, or a group of them.")
    add_flags(parser, settings_class)
    flags = parser.parse(arguments)
    if flags.config:
        check_file_keys(flags.config, settings_class)
    settings: NodeSettings = resolve(settings_class, flags)
    if settings.data_parallel_size == 1:
        status: int = importlib.import_module(f"{module}.__main__").main(arguments)
        return status
    group = settings.node_id or f"{name}-{secrets.token_hex(3)}"
    specs = engine_specs(module, group, settings, os.environ)
    supervisor = Supervisor(
        specs,
        Console(sys.stderr),
        start_timeout_s=START_TIMEOUT_S,
        stop_timeout_s=settings.shutdown_timeout_s + STOP_MARGIN_S,
    )
    return supervisor.run(lambda addresses: emit(Ready(name, addresses[specs[0].name])))


def engine_specs(module: str, group: str, settings: NodeSettings, environment: Mapping[str, str]) -> list[ChildSpec]:
    """The nodes of a group: `GROUP-0` and so on. Each has its share of this machine and, where `settings` name ports,
    ports of its own."""
    count, specs = settings.data_parallel_size, []
    num_ranks = [settings.num_ranks_here] * count
    # other groups may be on this machine
    shares = shares_of(settings, count, environment, pin_cpus=False, num_ranks=num_ranks)
    inherited = {**child_environment(environment), **secret_environment(settings), "PYTHONUNBUFFERED": "1"}
    for number, share in enumerate(shares):
        own = replace(
            placed(settings, share, count),
            node_id=f"{group}-{number}",
            node_group=settings.node_group or group,
            data_parallel_size=1,
            port=settings.port and settings.port + PORTS_OF_A_NODE * number,
            http_port=settings.http_port and settings.http_port + number,
            kv_events_config=of_node(settings.kv_events_config, number),
        )
        variables = {**inherited, VISIBLE_DEVICES: share.device} if share.device else inherited
        has_key = bool(settings.cluster_key)
        specs.append(ChildSpec(own.node_id, module, tuple(as_flags(own)), variables, reloads=has_key, group=group))
    return specs
