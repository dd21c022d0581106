"""A trial of `baton cluster` on Ray: `python -m tests.cluster.ray_trial`, with an interpreter that has Ray.

On a Ray cluster of three simulated machines, all of them on this one, it runs the conformance suite of backends, and
then the command as an operator does: brings a router, a prefill node and a decode node up; compares greedy answers with
those of transformers; kills workers of Ray and a whole machine under load; has the load grow until there are two
prefill and three decode nodes, and shrink until there is one of each; and takes everything down. A second deployment
has a decode node of two ranks, of which one is killed; a third has two routers, of which one is killed; a fourth has a
decode node with a rank on each of two machines, and loses `baton rank`, what watches over it, and its machine. It fails
when a request fails or has a wrong token, when something is not as it should be in time, or when a process, a placement
group or a segment is left. It ends by itself within twenty minutes.

Nothing in it depends on how fast the machine is: streams are added until the goals are missed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import ray

from baton.demo.location import checkpoint_path
from baton.launch.cluster.ray_backend import connect, disconnect
from tests.cluster import ray_conformance
from tests.cluster.load import Load, Prompt, Tally, known_answers
from tests.cluster.machines import BACK, FRONT, Machines, machines
from tests.system.harness import ROOT, own_segments

NAME = "trial"
NUM_PROMPTS, NUM_TOKENS = 16, 160
CHANGE_S = 360.0
"""How long the deployment may take for what it is waited for."""
FIRST_STREAMS, MAX_STREAMS, GROWTH = 16, 256, 1.5
GROW_S = 10.0
"""How long a number of streams is looked at before it grows: longer than a window of the policy."""
_RANK = "baton.ranks"

FILE = """
name = "trial"
start_timeout_s = 180
environment = {{ HF_HUB_OFFLINE = "1" }}

[goals]
ttft_ms = {ttft_ms}
tpot_ms = {tpot_ms}

[scaling]
window_s = 8
up_after_s = 3
down_after_s = 15
settle_s = 8

[router]
resources = {{ CPU = 1, {front} = 1 }}
flags = {{ port = 0, control-port = 0, node-wait-s = 120, served-model-name = "demo" }}

[prefill]
min = 1
max = 2
resources = {{ CPU = 1, {back} = 1 }}
flags = {{ dtype = "float32", max-num-batched-tokens = 128, enable-prefix-caching = false }}

[decode]
min = 1
max = 3
resources = {{ CPU = 1, {back} = 1 }}
flags = {{ dtype = "float32", max-num-batched-tokens = 128, enable-prefix-caching = false }}
"""
OF_RANKS = """
name = "trial"
start_timeout_s = 180
environment = {{ HF_HUB_OFFLINE = "1" }}

[router]
resources = {{ CPU = 1, {front} = 1 }}
flags = {{ port = 0, control-port = 0, node-wait-s = 120, served-model-name = "demo" }}

[prefill]
resources = {{ CPU = 1, {back} = 1 }}
flags = {{ dtype = "float32" }}

[decode]
resources = {{ CPU = 2, {back} = 1 }}
flags = {{ dtype = "float32", tensor-parallel-size = 2 }}
"""
OF_ROUTERS = """
name = "trial"
start_timeout_s = 180
environment = {{ HF_HUB_OFFLINE = "1" }}

[router]
count = 2
resources = {{ CPU = 1, {front} = 1 }}
flags = {{ port = 0, control-port = 0, node-wait-s = 120, served-model-name = "demo" }}

[prefill]
resources = {{ CPU = 1, {back} = 1 }}
flags = {{ dtype = "float32" }}

[decode]
resources = {{ CPU = 1, {back} = 1 }}
flags = {{ dtype = "float32" }}
"""
OF_MACHINES = """
name = "trial"
listen = "machine"
start_timeout_s = 180
environment = {{ HF_HUB_OFFLINE = "1" }}

[router]
resources = {{ CPU = 1, {front} = 1 }}
flags = {{ port = 0, control-port = 0, node-wait-s = 120, served-model-name = "demo", allow-unauthenticated = true }}

[prefill]
resources = {{ CPU = 1, {front} = 1 }}
flags = {{ dtype = "float32", kv-checksum = "dot64" }}

[decode]
machines = 2
resources = {{ CPU = 1, {back} = 1 }}
flags = {{ dtype = "float32", kv-checksum = "dot64", pipeline-parallel-size = 2 }}
"""
Answers = Mapping[Prompt, Sequence[int]]


def say(text: str) -> None:
    """One line, with the time."""
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stdout.flush()


@dataclass
class Command:
    """`baton cluster` at one Ray cluster."""

    address: str

    def run(self, *arguments: str, timeout_s: float = 300.0) -> str:
        """What it wrote to stdout; fails unless its status is 0."""
        command = [sys.executable, "-m", "baton", "cluster", *arguments, f"--address={self.address}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, cwd=ROOT)
        assert done.returncode == 0, f"{' '.join(arguments)}: {done.stderr}"
        return done.stdout

    def status(self) -> dict[str, Any]:
        """What `status --json` says."""
        told = self.run("status", "--name", NAME, "--json")
        assert told.startswith("{"), told
        status: dict[str, Any] = json.loads(told)
        return status

    def member(self, name: str) -> dict[str, Any]:
        """A program in the status."""
        return next(member for member in self.status()["members"] if member["name"] == name)

    def wait(
        self,
        condition: Callable[[dict[str, Any]], bool],
        what: str,
        meanwhile: Callable[[dict[str, Any]], None] = lambda status: None,
    ) -> dict[str, Any]:
        """The status once a condition holds; `meanwhile` gets each one before."""
        begun_s = time.monotonic()
        while True:
            status = self.status()
            if condition(status):
                say(f"  {what}: after {time.monotonic() - begun_s:.1f} s")
                return status
            if time.monotonic() - begun_s > CHANGE_S:
                shown = self.run("status", "--name", NAME)
                raise AssertionError(f"after {CHANGE_S:g} s still not: {what}\n{shown}")
            meanwhile(status)
            time.sleep(0.5)

    def wait_again_ready(self, before: Mapping[str, Any]) -> None:
        """Wait until a program lives in another process, and all are ready."""
        name, pid = before["name"], before["pid"]
        self.wait(
            lambda status: (
                status["is_ready"]
                and any(member["name"] == name and member["pid"] != pid for member in status["members"])
            ),
            f"{name} is back, and all are ready",
        )

    def wait_sizes(
        self, num_prefill: int, num_decode: int, meanwhile: Callable[[dict[str, Any]], None] = lambda status: None
    ) -> None:
        """Wait for these sizes."""
        wanted = (num_prefill, num_decode)
        self.wait(
            lambda status: (
                wanted == tuple(status["groups"][role]["ready"] for role in ("prefill", "decode"))
                and status["is_ready"]
            ),
            f"{num_prefill} prefill nodes and {num_decode} decode nodes",
            meanwhile,
        )


def require_good(what: str, tally: Tally) -> None:
    """Say what became of a load; fails when a request failed."""
    say(f"  {what}: {tally}")
    assert not tally.failures, tally.failures[:5]
    assert tally.num_right


def kill_worker(member: Mapping[str, Any]) -> None:
    """Kill the worker of Ray that watches over a program."""
    worker = psutil.Process(member["pid"]).parent()
    assert worker is not None
    assert "ray::" in " ".join(worker.cmdline()), worker.cmdline()
    worker.kill()


def kill_controller() -> None:
    """Kill the worker of Ray in which the controller is."""
    named = [(each, " ".join(each.info["cmdline"] or ())) for each in psutil.process_iter(["cmdline"])]
    ours = [each for each, name in named if "ray::ControllerActor" in name]
    assert len(ours) == 1, ours
    ours[0].kill()


def faults(command: Command, running: Machines, url: str, answers: Answers) -> None:
    """Workers and a machine are killed under load."""
    with Load(url, answers, 4) as load:
        time.sleep(3.0)
        for name in ("decode-0", "prefill-0"):
            say(f"kill the worker of {name}")
            before = command.member(name)
            kill_worker(before)
            command.wait_again_ready(before)
        say("kill the process of decode-0")
        before = command.member("decode-0")
        os.kill(before["pid"], signal.SIGKILL)
        command.wait_again_ready(before)
        say("kill the controller")
        pids = {member["pid"] for member in command.status()["members"]}
        kill_controller()
        time.sleep(2.0)
        status = command.wait(lambda status: status["is_ready"], "the controller is back")
        assert {member["pid"] for member in status["members"]} == pids, "it has disturbed what runs"
        before = command.member("decode-0")
        say(f"kill machine {before['machine']}")
        running.kill(before["machine"])
        command.wait_again_ready(before)
        say("a machine joins")
        running.add()
        time.sleep(3.0)
    require_good("under faults", load.tally)


@dataclass
class Growth:
    """Adds streams to a load as long as a group that may have more nodes meets its goal with those that it has."""

    load: Load
    grown_s: float = field(default_factory=time.monotonic)

    def __call__(self, status: dict[str, Any]) -> None:
        groups = status["groups"].values()
        is_met = any(group["desired"] < group["maximum"] and group["pressure"] <= 1 for group in groups)
        now_s = time.monotonic()
        if is_met and status["is_ready"] and now_s - self.grown_s > GROW_S and self.load.num_streams < MAX_STREAMS:
            self.grown_s, self.load.num_streams = now_s, round(GROWTH * self.load.num_streams)
            say(f"  the goals are met: {self.load.num_streams} streams at a time from now on")


def scaling(command: Command, url: str, answers: Answers) -> None:
    """The load grows, and shrinks."""
    say(f"{FIRST_STREAMS} streams at a time")
    with Load(url, answers, FIRST_STREAMS) as load:
        command.wait_sizes(2, 3, Growth(load))
        time.sleep(5.0)
    require_good("while it grew", load.tally)
    say("a stream now and then")
    with Load(url, answers, 1, pause_s=1.0) as load:
        command.wait_sizes(1, 1)
    require_good("while it shrank", load.tally)


def kill_rank(command: Command) -> None:
    """Kill the second rank of decode-0, which is on the machine of the first; the node has to come back whole."""
    before = command.member("decode-0")
    ranks = [child for child in psutil.Process(before["pid"]).children() if _RANK in child.cmdline()]
    assert len(ranks) == 1, ranks
    say(f"kill rank 1 of decode-0, on machine {before['machine']} as rank 0")
    ranks[0].kill()
    command.wait_again_ready(before)


def of_ranks(command: Command, url: str, answers: Answers) -> None:
    """A node of two ranks has a place for both on one machine, answers right, and ends as one."""
    connect(NAME, command.address)
    places = [group for group in ray.util.placement_group_table().values() if group["state"] == "CREATED"]
    disconnect()
    (bundles,) = [group["bundles"] for group in places if group["name"].startswith("decode-0.")]
    assert [bundle["CPU"] for bundle in bundles.values()] == [4.0], bundles
    with Load(url, answers, 2) as load:
        time.sleep(5.0)
        kill_rank(command)
        time.sleep(5.0)
    require_good("with a node of two ranks", load.tally)


def program_of_ranks() -> psutil.Process:
    """`baton rank` of the one machine that runs it."""
    (found,) = [
        each for each in psutil.process_iter(["cmdline"]) if "baton.ranks.command" in (each.info["cmdline"] or ())
    ]
    return found


def of_machines(command: Command, running: Machines, url: str, answers: Answers) -> None:
    """A node with a rank on each of two machines answers right, and comes back when it has lost a part."""
    connect(NAME, command.address)
    places = [group for group in ray.util.placement_group_table().values() if group["state"] == "CREATED"]
    disconnect()
    (place,) = [group for group in places if group["name"].startswith("decode-0.")]
    assert [bundle["CPU"] for bundle in place["bundles"].values()] == [1.0, 1.0], place
    machines_of_place = set(place["bundles_to_node_id"].values())
    assert len(machines_of_place) == 2, place
    with Load(url, answers, 2) as load:
        time.sleep(5.0)
        say("kill baton rank")
        before = command.member("decode-0")
        program_of_ranks().kill()
        command.wait_again_ready(before)
        say("kill what watches over baton rank")
        before = command.member("decode-0")
        worker = program_of_ranks().parent()
        assert worker is not None
        worker.kill()
        command.wait_again_ready(before)
        before = command.member("decode-0")
        other = next(node for node in running.nodes if not node.node_id.startswith(before["machine"]))
        say(f"a machine joins, and machine {other.node_id[:12]} is killed, which has the other rank")
        running.add()
        running.kill(other.node_id)
        command.wait_again_ready(before)
        time.sleep(5.0)
    require_good("with a node over two machines", load.tally)


def of_routers(command: Command, urls: str, answers: Answers) -> None:
    """Two routers serve with the same nodes; when one dies, requests of the other notice nothing."""
    first, second = urls.split(" and ")
    with Load(first, answers, 2) as steady:
        with Load(second, answers, 2) as other:
            time.sleep(5.0)
        require_good("at the second router", other.tally)
        say("kill the worker of router-1")
        pids = {member["name"]: member["pid"] for member in command.status()["members"]}
        before = command.member("router-1")
        kill_worker(before)
        command.wait_again_ready(before)
        with Load(command.member("router-1")["address"], answers, 2) as other:
            time.sleep(5.0)
        require_good("at the second router, in its next life", other.tally)
    require_good("at the first router meanwhile", steady.tally)
    after = {member["name"]: member["pid"] for member in command.status()["members"]}
    assert {name for name in pids if pids[name] != after[name]} == {"router-1"}, (pids, after)


def deployment(running: Machines, text: str, live: Callable[[Command, str], None]) -> None:
    """The whole life of a deployment, which `live` fills."""
    command = Command(running.address)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cluster.toml"
        file.write_text(text)
        begun_s = time.monotonic()
        told = command.run("up", str(file))
        say(f"up after {time.monotonic() - begun_s:.1f} s")
    live(command, told.splitlines()[0].removeprefix("Baton ready at "))
    say("\n" + command.run("status", "--name", NAME))
    members = [psutil.Process(member["pid"]) for member in command.status()["members"]]
    segments = {segment for member in members for segment in own_segments(member.pid)}
    begun_s = time.monotonic()
    command.run("down", "--name", NAME)
    say(f"down after {time.monotonic() - begun_s:.1f} s")
    left = [f"process {member.pid}" for member in members if member.is_running()]
    left += [f"segment {segment}" for segment in segments if (Path("/dev/shm") / segment).exists()]
    connect(NAME, running.address)
    left += [group["name"] for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]
    left += [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    disconnect()
    assert not left, left


def trial(running: Machines, parsed: argparse.Namespace) -> None:
    """All deployments, or the part of them that was asked for."""
    say("what transformers says")
    answers = known_answers(checkpoint_path(), NUM_PROMPTS, NUM_TOKENS)

    def live(command: Command, url: str) -> None:
        with Load(url, answers, 1) as load:
            time.sleep(8.0)
        require_good("one stream at a time", load.tally)
        if parsed.only != "scaling":
            faults(command, running, url, answers)
        scaling(command, url, answers)

    if parsed.only not in ("ranks", "machines", "routers"):
        goals = {"ttft_ms": parsed.ttft_ms, "tpot_ms": parsed.tpot_ms}
        deployment(running, FILE.format(**goals, front=FRONT, back=BACK), live)
    if parsed.only in (None, "ranks"):
        text = OF_RANKS.format(front=FRONT, back=BACK)
        deployment(running, text, lambda command, url: of_ranks(command, url, answers))
    if parsed.only in (None, "machines"):
        text = OF_MACHINES.format(front=FRONT, back=BACK)
        deployment(running, text, lambda command, url: of_machines(command, running, url, answers))
    if parsed.only in (None, "routers"):
        text = OF_ROUTERS.format(front=FRONT, back=BACK)
        deployment(running, text, lambda command, urls: of_routers(command, urls, answers))


def main() -> int:
    """Run what was asked for; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.ray_trial", description=__doc__)
    parts = ("conformance", "deployment", "scaling", "ranks", "machines", "routers")
    parser.add_argument("--only", choices=parts, help="one part of it")
    parser.add_argument("--ttft-ms", type=float, default=60.0, help="goal by which prefill nodes scale")
    parser.add_argument("--tpot-ms", type=float, default=30.0, help="goal by which decode nodes scale")
    parsed = parser.parse_args()
    with machines() as running:
        if parsed.only in (None, "conformance"):
            say("conformance of the backend")
            ray_conformance.run(running)
        if parsed.only != "conformance":
            trial(running, parsed)
    say("nothing is left")
    return 0


if __name__ == "__main__":
    sys.exit(main())
