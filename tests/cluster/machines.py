"""Helper: a Ray cluster of several simulated machines, all of them on this one, with small limits.

Needs Ray. Everything it starts is ended with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ray.cluster_utils import Cluster

NUM_CPUS = 4
OBJECT_STORE_BYTES = 80_000_000


@dataclass
class Machines:
    """A running cluster: machine 0 has Ray's own head."""

    cluster: Any
    nodes: list[Any]

    @property
    def address(self) -> str:
        """For `ray.init`."""
        return str(self.cluster.address)

    def kill(self, machine: str) -> None:
        """A machine, named as the status names it, is gone at once."""
        node = next(node for node in self.nodes if node.node_id.startswith(machine))
        self.nodes.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)

    @property
    def head(self) -> str:
        """The machine whose loss would be the loss of Ray."""
        return str(self.cluster.head_node.node_id)


@contextlib.contextmanager
def machines(num_machines: int = 3) -> Iterator[Machines]:
    """A cluster of so many machines of `NUM_CPUS` logical CPUs each."""
    limits = {
        "num_cpus": NUM_CPUS,
        "num_gpus": 0,
        "object_store_memory": OBJECT_STORE_BYTES,
        "include_dashboard": False,
    }
    cluster = Cluster(initialize_head=True, head_node_args=limits)
    try:
        nodes = [cluster.add_node(**limits) for _ in range(num_machines - 1)]
        cluster.wait_for_nodes()
        yield Machines(cluster, nodes)
    finally:
        cluster.shutdown()
