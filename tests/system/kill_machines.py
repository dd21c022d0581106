"""A node whose ranks are on two machines, and all that may happen to them: `python -m tests.system.kill_machines`.

The second machine is a network namespace behind a virtual cable, so this needs root and iproute2; all programs have a
cluster key. One relay: a prefill node and a decode node here, and a decode node of two ranks, one of them on the other
machine. While streams run

- the rank there, `baton rank`, or the driver gets SIGKILL, or SIGSTOP;
- the cable is pulled.

Every time the node ends, the ranks on the other machine end, and both within their bound (`END_S` after a death,
`SILENCE_S` more after what only silence tells); the node's log has one line that says why; every stream has the tokens
of transformers; and a node that starts again finds its machine. At the end nothing is left.
"""

from __future__ import annotations

import argparse
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil
import zmq

from baton.ranks.executor.leading import LEAST_S
from baton.ranks.machines.link import SILENCE_S
from baton.wire.keys import KeyFile
from tests.checkpoints import make_checkpoint
from tests.free_port import free_port
from tests.system.harness import Node, Process, Relay, wait_until
from tests.system.parallel_grid import say
from tests.system.reference import Reference, make_prompt
from tests.system.spread import END_S, Machine

_DRIVER_IP, _MACHINE_IP = "10.87.0.1", "10.87.0.2"
_NUM_STREAMS, _NUM_TOKENS = 8, 48
_HUNG = "and the driver hangs in a call with the ranks: this process ends"
"""A rank that cannot be ended, because nobody hears that it should, leaves the driver in the step."""
_COMMON = ("--kv-checksum", "dot64", "--kv-transport", "zmq", "--num-blocks", "96", "--max-num-batched-tokens", "24")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=20)


@dataclass(frozen=True, slots=True)
class Cable:
    """From this machine to a namespace."""

    name: str

    def pull(self) -> None:
        """Nothing arrives any more, in either direction, and nobody is told."""
        self._set("down")

    def plug(self) -> None:
        """As before."""
        self._set("up")

    def start(self, command: Sequence[str], environment: Mapping[str, str], out: IO[bytes], err: IO[bytes]) -> Process:
        """See `Starter`: on the other machine."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self.name, sys.executable, *command], env=dict(environment), stdout=out, stderr=err
        )

    def _set(self, state: str) -> None:
        """The other end: this machine's address goes on for the programs here. No connection is told."""
        _ip("-n", self.name, "link", "set", f"{self.name}p", state)


@contextmanager
def cable() -> Iterator[Cable]:
    """A namespace with an address, and a way to it."""
    name = f"btn{secrets.token_hex(3)}"
    _ip("netns", "add", name)
    try:
        _ip("link", "add", f"{name}v", "type", "veth", "peer", "name", f"{name}p")
        _ip("link", "set", f"{name}p", "netns", name)
        _ip("addr", "add", f"{_DRIVER_IP}/24", "dev", f"{name}v")
        _ip("link", "set", f"{name}v", "up")
        _ip("-n", name, "addr", "add", f"{_MACHINE_IP}/24", "dev", f"{name}p")
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", name, "link", "set", f"{name}p", "up")
        yield Cable(name)
    finally:
        _ip("netns", "del", name)


@dataclass
class Trial:
    """What runs. `node`: the one that is spread; `machine`: the other machine of it."""

    relay: Relay
    reference: Reference
    cable: Cable
    flags: tuple[str, ...]
    key: tuple[str, ...]
    model: Path
    node: Node
    machine: Machine

    def restore(self) -> None:
        """The node again, and the machine if it is gone."""
        if not self.machine.program.is_running:
            self.machine = self.new_machine()
        if self.node not in self.relay.nodes:
            self.node = self.relay.add("decode", *self.flags)
        self.relay.wait_for_members()

    def new_machine(self) -> Machine:
        """`baton rank` on the other side of the cable."""
        driver = f"{_DRIVER_IP}:{self.flags[self.flags.index('--rank-port') + 1]}"
        name = f"machine-{secrets.token_hex(2)}"
        return Machine(name, self.model, self.relay.folder, driver, _MACHINE_IP, *self.key, start=self.cable.start)


def run(trial: Trial, what: str, act: Callable[[Trial], None], reason: str, bounds_s: tuple[float, float]) -> str:
    """Do it to a running node; what to print. `bounds_s`: of the end of the node, and of the ranks there."""
    relay, node = trial.relay, trial.node
    ranks = trial.machine.ranks
    prompts = [make_prompt(30 + 17 * index, len(what)) for index in range(_NUM_STREAMS)]
    expected = [trial.reference.greedy(prompt, _NUM_TOKENS).token_ids for prompt in prompts]
    with ThreadPoolExecutor(_NUM_STREAMS) as threads:
        half = _NUM_STREAMS // 2
        answers = [threads.submit(relay.ask, prompt, _NUM_TOKENS) for prompt in prompts[:half]]
        time.sleep(0.1)
        # what stands still is noticed in a step: there has to be one
        answers += [threads.submit(relay.ask, prompt, _NUM_TOKENS) for prompt in prompts[half:]]
        begin_s = time.monotonic()
        act(trial)
        wait_until(lambda: not node.is_running, f"the node ended after {what}", bounds_s[0])
        node_s = time.monotonic() - begin_s
        if "STOP" not in what or "baton rank" not in what:
            wait_until(lambda: not any(map(psutil.Process.is_running, ranks)), f"ranks ended after {what}", bounds_s[1])
        ranks_s = time.monotonic() - begin_s
        relay.nodes.remove(node)
        for program in (node, trial.machine.program):
            if program.is_running:
                program.signal(signal.SIGCONT)
        wait_until(lambda: not any(map(psutil.Process.is_running, ranks)), f"ranks ended after {what}", END_S)
        found = [answer.result().token_ids for answer in answers]
    assert found == expected, "a stream went on with other tokens"
    said = [line for line in node.err.splitlines() if line.startswith("error: ") or line.endswith(_HUNG)]
    assert (len(said) == 1 and re.search(reason, said[0])) or not reason, said or node.err[-2000:]
    trial.restore()
    again = make_prompt(40, 7)
    assert relay.ask_all([again] * 4, 4, 8)[0].token_ids == trial.reference.greedy(again, 8).token_ids
    return f"{what}: node ended after {node_s:.1f} s, ranks there after {ranks_s:.1f} s: {''.join(said) or 'killed'}"


def _stop_driver(trial: Trial) -> None:
    """Until the other machine has noticed."""
    trial.node.signal(signal.SIGSTOP)
    trial.machine.wait_idle(SILENCE_S + END_S)
    trial.node.signal(signal.SIGCONT)


def _pull(trial: Trial) -> None:
    trial.cable.pull()
    try:
        wait_until(lambda: not trial.node.is_running, "the node ended", SILENCE_S + END_S + 2 * LEAST_S)
        trial.machine.wait_idle(SILENCE_S + END_S)
    finally:
        trial.cable.plug()


_STILL_S = 2 * LEAST_S + END_S
_SILENT_S = SILENCE_S + END_S
CASES: tuple[tuple[str, Callable[[Trial], None], str, tuple[float, float]], ...] = (
    ("SIGKILL of the rank", lambda t: t.machine.ranks[0].kill(), "rank 1 of 2 on .* SIGKILL", (END_S, END_S)),
    ("SIGKILL of baton rank", lambda t: t.machine.program.kill(), "rank 1 of 2 on .* is gone", (END_S, END_S)),
    ("SIGKILL of the driver", lambda t: t.node.process.kill(), "", (END_S, END_S)),
    ("SIGSTOP of the rank", lambda t: t.machine.ranks[0].suspend(), "rank 1 of 2 .* is stopped", (_STILL_S, _STILL_S)),
    ("SIGSTOP of baton rank", lambda t: t.machine.program.signal(signal.SIGSTOP), "not been heard", (_SILENT_S, END_S)),
    ("SIGSTOP of the driver", _stop_driver, "rank 1 of 2 on", (_STILL_S, END_S)),
    ("the cable pulled", _pull, "rank 1 of 2 on|lost each other", (END_S, END_S)),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Try all; 0 when all was right."""
    parser = argparse.ArgumentParser(prog="python -m tests.system.kill_machines", description=__doc__)
    parser.add_argument("--only", default="", help="a part of what is done")
    asked = parser.parse_args(arguments)
    num_wrong = 0
    with tempfile.TemporaryDirectory() as place, cable() as way:
        folder = Path(place)
        model = make_checkpoint(folder / "model", "llama")
        (folder / "key").write_text(KeyFile((zmq.curve_keypair()[1],)).text())
        key = ("--cluster-key", str(folder / "key"))
        relay = Relay(model, folder, ("--local-prefill-tokens", "0", *key))
        port = str(free_port(_DRIVER_IP))
        spread = ("--tensor-parallel-size", "2", "--rank-machines", "2", "--rank-port", port)
        flags = (*_COMMON, *key, "--host", _DRIVER_IP, *spread)
        try:
            relay.start_router("--port", "0", "--control-port", "0")
            node = relay.launch("decode", *flags)
            trial = Trial(relay, Reference(model), way, flags, key, model, node, machine=None)  # type: ignore[arg-type]
            trial.machine = trial.new_machine()
            beside = [relay.launch(role, *_COMMON, *key, "--host", _DRIVER_IP) for role in ("prefill", "decode")]
            relay.join(node, *beside)
            for what, act, reason, bounds_s in CASES:
                if asked.only not in what:
                    continue
                try:
                    say(run(trial, what, act, reason, bounds_s))
                except AssertionError as error:
                    num_wrong += 1
                    say(f"WRONG: {what}: {error}")
                    break
            relay.stop()
            trial.machine.wait_idle()
            trial.machine.stop()
        finally:
            relay.close()
            if trial.machine is not None and trial.machine.program.is_running:
                trial.machine.program.kill()
    say("all right" if not num_wrong else f"{num_wrong} were wrong")
    return min(num_wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
