"""Helper: a Ray cluster of several simulated machines, all of them on this one, with small limits.

Needs Ray. Everything it starts is ended with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ray.cluster_utils import Cluster

NUM_CPUS = 4
OBJECT_STORE_BYTES = 80_000_000


FRONT, BACK = "front", "back"
"""What the machine with Ray's own head has, and what the others have: so that a file can tell them apart."""
_LIMITS = {
    "num_cpus": NUM_CPUS,
    "num_gpus": 0,
    "object_store_memory": OBJECT_STORE_BYTES,
    "include_dashboard": False,
}


@dataclass
class Machines:
    """A running cluster."""

    cluster: Any
    nodes: list[Any] = field(default_factory=list)

    @property
    def address(self) -> str:
        """For `ray.init`."""
        return str(self.cluster.address)

    def kill(self, machine: str) -> None:
        """A machine, named as the status names it, is gone at once."""
        node = next(node for node in self.nodes if node.node_id.startswith(machine))
        self.nodes.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)

    def add(self) -> None:
        """One more machine."""
        self.nodes.append(self.cluster.add_node(resources={BACK: 100}, **_LIMITS))


@contextlib.contextmanager
def machines(num_machines: int = 3) -> Iterator[Machines]:
    """A cluster of so many machines of `NUM_CPUS` logical CPUs each."""
    cluster = Cluster(initialize_head=True, head_node_args={"resources": {FRONT: 100}, **_LIMITS})
    running = Machines(cluster)
    try:
        for _ in range(num_machines - 1):
            running.add()
        cluster.wait_for_nodes()
        yield running
    finally:
        cluster.shutdown()
