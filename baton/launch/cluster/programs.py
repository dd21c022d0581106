"""The programs of a deployment as its file describes them: a router, and a node of a role under a name.

Owns their arguments and what they need of a machine. Does not know where they run: the address at which one listens,
and the cluster key, are completed there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from baton.launch.cluster.backend import Program
from baton.launch.cluster.file import ClusterFile, Group
from baton.launch.settings import LOOPBACK
from baton.node.settings import NodeSettings
from baton.ranks.settings import RankSettings
from baton.runtime.settings import as_flags, secret_environment
from baton.wire.keys import ROUTER
from baton.wire.messages.membership import PREFILL

CPU, GPU = "CPU", "GPU"
_MODULES = {ROUTER: "baton.router", PREFILL: "baton.prefill_node", "decode": "baton.decode_node"}
_RANK_MODULE = "baton.ranks.command"


class Ports(NamedTuple):
    """The ports at which a router listens for clients and for nodes; 0: the system chooses."""

    http: int
    control: int


def first_ports(file: ClusterFile, name: str) -> Ports:
    """The ports at which the router of that name listens at first.

    Several routers may be on one machine, so each has ports of its own. They are two apart, since the control port is
    likely to be the next one.
    """
    step = 2 * file.router_names.index(name)
    return Ports(*(port and port + step for port in (file.router.port, file.router.control_port)))


def router_program(file: ClusterFile, name: str, ports: Ports) -> Program:
    """The router of that name, with other ports than the file's."""
    settings = dataclasses.replace(file.router, port=ports.http, control_port=ports.control)
    host_flags: tuple[str, ...] = ()
    if file.listens_on_machine:
        # an address that the file names for clients stays: 0.0.0.0, or one network of several
        host_flags = ("--control-host", *(("--host",) if file.router.host == LOOPBACK else ()))
    return Program(
        name,
        _MODULES[ROUTER],
        tuple(as_flags(settings)),
        file.environment,
        host_flags,
        file.router_resources,
    )


def node_program(file: ClusterFile, group: Group[NodeSettings], name: str, routers: Sequence[str]) -> Program:
    """A node of a group that joins the routers at these addresses, with `baton rank` on its further machines."""
    ranks_here = group.ranks // group.machines
    settings = dataclasses.replace(
        group.settings,
        node_id=name,
        router=",".join(routers),
        num_threads=group.settings.num_threads or max(1, int(ranks_here * group.resources.get(CPU, 1))),
        # it may have a part of a GPU
        gpu_memory_utilization=round(
            group.settings.gpu_memory_utilization * min(1.0, group.engines * group.resources.get(GPU, 1.0)), 4
        ),
    )
    module, command = (_MODULES[group.role], ()) if group.engines == 1 else ("baton", (group.role,))
    return Program(
        name,
        module,
        (*command, *as_flags(settings)),
        {**file.environment, **secret_environment(settings)},
        ("--host",) if file.listens_on_machine else (),
        {resource: amount * ranks_here * group.engines for resource, amount in group.resources.items()},
        tuple(_ranks_program(file, settings, f"{name}/{number}") for number in range(1, group.machines)),
        "--rank-port" if group.machines > 1 else "",
    )


def _ranks_program(file: ClusterFile, node: NodeSettings, name: str) -> Program:
    """The ranks of a node on one of its further machines."""
    settings = RankSettings(
        node.model,
        trust_remote_code=node.trust_remote_code,
        num_threads=node.num_threads,
        shutdown_timeout_s=node.shutdown_timeout_s,
        log_level=node.log_level,
        log_format=node.log_format,
    )
    hosts = ("--host",) if file.listens_on_machine else ()
    return Program(name, _RANK_MODULE, tuple(as_flags(settings)), file.environment, hosts, dial_flag="--driver")
