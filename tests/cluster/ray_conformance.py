"""The conformance suite of backends over Ray: `python -m tests.cluster.ray_trial --only conformance`."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass

import psutil
import ray

from baton.launch.cluster.backend import Backend
from baton.launch.cluster.file import parse_cluster_file
from baton.launch.cluster.keeper import Secrets
from baton.launch.cluster.ray_backend import RayBackend, connect, disconnect, sweep
from tests.cluster.machines import NUM_CPUS, Machines
from tests.launch.cluster.conformance import CASES

NAME = "conformance"
FILE = f'name = "{NAME}"\nlisten = "machine"\n'
SECRETS = Secrets("k" * 40 + "\n")


@dataclass
class RayRig:
    """See `tests.launch.cluster.conformance.Rig`."""

    backend: Backend
    address: str

    def kill(self, name: str) -> None:
        os.kill(self._pid(name), signal.SIGKILL)

    def lose(self, name: str) -> None:
        worker = psutil.Process(self._pid(name)).parent()
        assert worker is not None
        worker.kill()

    def reopen(self) -> Backend:
        return RayBackend(parse_cluster_file(FILE, NAME), SECRETS)

    def is_running(self, pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def _pid(self, name: str) -> int:
        return self.backend.reports()[name].pid


def run(machines: Machines) -> None:
    """Run all cases. Raises `AssertionError`."""
    connect(NAME, machines.address)
    try:
        rig = RayRig(RayBackend(parse_cluster_file(FILE, NAME), SECRETS), ray.util.get_node_ip_address())
        assert {machine.resources["CPU"] for machine in rig.backend.machines()} == {float(NUM_CPUS)}
        for case in CASES:
            begun_s = time.monotonic()
            case(rig)
            for name in rig.backend.reports():
                rig.backend.remove(name)
            sys.stdout.write(f"  {case.__name__}: {time.monotonic() - begun_s:.1f} s\n")
            sys.stdout.flush()
    finally:
        sweep(NAME)
        disconnect()
