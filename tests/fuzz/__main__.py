"""Attacks a real deployment at all its ports, while good streams run through it.

    python -m tests.fuzz --minutes 10 --seed 1
    python -m tests.fuzz --minutes 10 --seed 1 --kv-transport nixl

Half of the time the deployment speaks plaintext on loopback and anybody is a member; the other half it has a key for
each role, with strangers that have none, or a wrong one, and insiders that stole those of a prefill and of a decode
node. What must hold: every program stays alive, with bounded memory; every good stream has the tokens that it has
without attackers; no turn of the router's event loop in which it works for more than 200 ms; and afterwards no block,
leg or request is left. How late the event loop was in all is told, not asserted: it depends on how busy the machine is.
Exits with 1 when something does not hold.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import zmq

from baton.kvtransfer.messages import RECEIVER_TO_SENDER
from baton.launch.key import role_file, write_role_keys
from baton.wire import links
from baton.wire.keys import ROLES, ROUTER, ClusterKey, KeyRing
from baton.wire.links import LinkSettings
from baton.wire.messages.legs import Decode
from baton.wire.messages.membership import DECODE, PREFILL, Hello, Welcome, control_identity
from baton.wire.messages.output import Failed
from baton.wire.messages.vocabulary import NODE_TO_ROUTER, ROUTER_TO_NODE
from baton.wire.session import Session
from tests.checkpoints import make_checkpoint
from tests.fuzz.attackers import (
    TO_ROUTER,
    Attacker,
    Blocks,
    Frames,
    HttpRequests,
    Knowledge,
    LyingNode,
    PeerFrames,
    RawBytes,
)
from tests.system.harness import MODEL_NAME, Answer, Program, Relay, start_relay
from tests.system.reference import make_prompt

MAX_GROWTH_BYTES = 256 * 2**20
MAX_OWN_LAG_S = 0.2
_NUM_STREAMS, _NUM_PROMPTS, _MAX_TOKENS = 2, 6, 24
_WARM_UP_S, _LOOK_S = 5.0, 1.0
_LEARNS_S = 60.0
_SETTLES_S = 120.0


@dataclass(slots=True)
class Streams:
    """Good streams, one after the other in each of some threads. `wrong`: what was not as it should be."""

    relay: Relay
    expected: dict[tuple[int, ...], Answer]
    num_done: int = 0
    wrong: list[str] = field(default_factory=list)
    _is_over: threading.Event = field(default_factory=threading.Event)

    def run(self, first: int) -> None:
        """Ask until told to stop."""
        prompts = list(self.expected)
        while not self._is_over.is_set():
            prompt = prompts[first % len(prompts)]
            first += 1
            try:
                answer = self.relay.ask(prompt, _MAX_TOKENS)
            except Exception as error:  # whatever a client sees is a finding
                self.wrong.append(f"{type(error).__name__}: {error}")
                continue
            if answer != self.expected[prompt]:
                self.wrong.append(f"{answer.token_ids} instead of {self.expected[prompt].token_ids}")
            self.num_done += 1

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Run them while the block runs."""
        threads = [threading.Thread(target=self.run, args=(number,), daemon=True) for number in range(_NUM_STREAMS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            for thread in threads:
                thread.join(90)


@dataclass(slots=True)
class Memory:
    """How much each program of a relay has `grown` since it was first looked at, at each later look."""

    relay: Relay
    grown: dict[str, list[int]] = field(default_factory=dict)
    _first: dict[str, int] = field(default_factory=dict)

    def look(self) -> None:
        """Measure. Raises `AssertionError` when a program has ended or grown too much."""
        for program in (self.relay.router, *self.relay.nodes):
            assert program.is_running, f"{program.name} has ended:\n{program.err[-4000:]}"
            rss = psutil.Process(program.process.pid).memory_info().rss
            grown = rss - self._first.setdefault(program.name, rss)
            self.grown.setdefault(program.name, []).append(grown)
            assert grown < MAX_GROWTH_BYTES, f"{program.name} has grown by {grown / 2**20:.0f} MiB"


class Phase:
    """A deployment, and what its insiders have: settings towards the router and peers, by the role of their key."""

    def __init__(self, name: str, model: Path, folder: Path, kv_transport: str, *, has_keys: bool) -> None:
        self.name = name
        self.kv_transport = kv_transport
        self.keys = folder / "keys"
        flags: dict[str, list[str]] = {role: [] for role in ROLES}
        if has_keys:
            folder.mkdir()
            write_role_keys(self.keys)
            flags = {role: ["--cluster-key", str(role_file(self.keys, role))] for role in ROLES}
        self.has_keys = has_keys
        node_flags = ["--kv-transport", kv_transport]
        self.relay = start_relay(
            model,
            folder,
            router=flags[ROUTER],
            prefill=[[*node_flags, *flags[PREFILL]]],
            decode=[[*node_flags, *flags[DECODE]]],
        )

    def settings(self, role: str, towards: str) -> LinkSettings:
        """How the holder of a role's key dials programs of another role."""
        if not self.has_keys:
            return LinkSettings()
        return LinkSettings(cluster_key=KeyRing(role_file(self.keys, role), role).towards(towards))

    def attackers(self, known: Knowledge, seed: int) -> list[Attacker]:
        """All of them."""
        control = self.relay.router.ready["control_address"]
        stranger = LinkSettings(cluster_key=ClusterKey(*zmq.curve_keypair())) if self.has_keys else LinkSettings()
        ports = [port for program in (self.relay.router, *self.relay.nodes) for port in sorted(program.ports)]
        health = [int(node.address.rsplit(":", 1)[1]) for node in self.relay.nodes]
        http = int(self.relay.router.address.rsplit(":", 1)[1])
        (decode,) = self.relay.decodes
        data = next(port for port in sorted(decode.ports) if port not in health)
        data_address, peer = f"tcp://127.0.0.1:{data}", known.peer_address.partition("#")[0]
        found: list[Attacker] = [
            RawBytes("bytes at every port", ports, seed),
            HttpRequests("HTTP at the router", [http], MODEL_NAME, seed),
            HttpRequests("HTTP at health ports", health, MODEL_NAME, seed),
            Frames("frames at the router", zmq.DEALER, control, stranger, TO_ROUTER, seed),
            Blocks("frames at D", data_address, stranger, seed),
            LyingNode(control, self.settings(DECODE, ROUTER), known, seed),
            PeerFrames(self.kv_transport, data_address, self.settings(DECODE, PREFILL), known, seed),
        ]
        if self.has_keys:
            to_router, to_decode = self.settings(PREFILL, ROUTER), self.settings(PREFILL, DECODE)
            found += [
                Frames("stranger at P", zmq.DEALER, peer, stranger, RECEIVER_TO_SENDER, seed),
                Frames("stolen prefill key at the router", zmq.DEALER, control, to_router, TO_ROUTER, seed),
                Blocks("stolen prefill key at D", data_address, to_decode, seed),
            ]
        return found

    def learn(self, hello: Hello) -> Knowledge:
        """Be a decode node until a request comes, which names a prefill node; then refuse it, so that others serve it,
        and be gone."""
        settings = self.settings(DECODE, ROUTER)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        link = links.open_socket(context, zmq.DEALER, settings)
        try:
            link.setsockopt(zmq.IDENTITY, control_identity(hello.epoch))
            links.connect(link, self.relay.router.ready["control_address"], settings)
            link.send(NODE_TO_ROUTER.encode(hello))
            return self._learn(link, hello)
        finally:
            context.destroy(linger=0)

    def _learn(self, link: zmq.Socket[bytes], hello: Hello) -> Knowledge:
        session: Session | None = None
        deadline_s, asking = time.monotonic() + _LEARNS_S, []
        while time.monotonic() < deadline_s:
            if not link.poll(500):
                continue
            message = ROUTER_TO_NODE.decode(link.recv_multipart()[-1])
            if isinstance(message, Welcome) and session is None:
                session = Session(message.session, NODE_TO_ROUTER)
                asking = [threading.Thread(target=self._ask, args=(number,)) for number in range(4)]
                for thread in asking:
                    thread.start()
            elif isinstance(message, Decode) and session is not None:
                link.send_multipart(session.frames(Failed(message.handoff_id, message.attempt, "overloaded", "busy")))
                if message.prefill_peer is not None:
                    return self._known(link, asking, hello, message)
        raise AssertionError(f"{self.name}: an insider was given no request in {_LEARNS_S:g} s")

    def _known(
        self, link: zmq.Socket[bytes], asking: Sequence[threading.Thread], hello: Hello, leg: Decode
    ) -> Knowledge:
        assert leg.prefill_peer is not None
        link.close(linger=500)
        for thread in asking:
            thread.join(60)
        return Knowledge(hello, leg.prefill_peer.address, leg.prefill_peer.epoch)

    def _ask(self, number: int) -> None:
        self.relay.ask(make_prompt(40, 1000 + number), 2)

    def run(self, hello: Hello, for_s: float, seed: int) -> list[str]:
        """Attack for so long. Returns what did not hold."""
        prompts = [make_prompt(length, seed) for length in (5, 17, 40, 64, 90, 33)[:_NUM_PROMPTS]]
        streams = Streams(self.relay, {prompt: self.relay.ask(prompt, _MAX_TOKENS) for prompt in prompts})
        known = self.learn(hello)
        attackers, memory = self.attackers(known, seed), Memory(self.relay)
        faults: list[str] = []
        with streams.beside():
            time.sleep(_WARM_UP_S)
            try:
                self._attack(attackers, memory, for_s)
            except AssertionError as error:
                faults.append(str(error))
        faults += [f"a good stream: {text}" for text in streams.wrong[:5]]
        faults += [f"{each.name} broke down: {each.failure!r}" for each in attackers if each.failure is not None]
        if not faults:
            self.relay.settle(_SETTLES_S)
            faults += _turns_too_long(self.relay.router)
        self._tell(attackers, memory, streams)
        return [f"{self.name}: {text}" for text in faults]

    def _attack(self, attackers: Sequence[Attacker], memory: Memory, for_s: float) -> None:
        memory.look()
        for attacker in attackers:
            attacker.start()
        try:
            until_s = time.monotonic() + for_s
            while time.monotonic() < until_s:
                time.sleep(_LOOK_S)
                memory.look()
        finally:
            for attacker in attackers:
                attacker.stop()

    def _tell(self, attackers: Sequence[Attacker], memory: Memory, streams: Streams) -> None:
        _say(f"{self.name}: {streams.num_done} good streams, {len(streams.wrong)} of them wrong")
        for attacker in attackers:
            welcomes = f", welcomed {attacker.num_welcomes} times" if isinstance(attacker, LyingNode) else ""
            _say(f"  {attacker.name}: {attacker.num_acts} attempts{welcomes}")
        for name, grown in memory.grown.items():
            middle, end = grown[len(grown) // 2] / 2**20, grown[-1] / 2**20
            _say(f"  {name} grew by {middle:.0f} MiB in the first half, {end - middle:.0f} in the second")
        for program in (self.relay.router, *self.relay.nodes):
            for line in _metrics_of(program) if program.is_running else ():
                _say(f"  {program.name}: {line}")


def _metrics_of(program: Program) -> list[str]:
    """What its metrics say about rejected messages and late event loops."""
    with urllib.request.urlopen(f"{program.address}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    told = ("rejected", "refused", "lag_max")
    return [line for line in lines if not line.startswith("#") and any(word in line for word in told)]


def _turns_too_long(router: Program) -> list[str]:
    """Whether its event loop has worked for too long without giving way, by the processor time that it took."""
    longest_s = max(float(line.split()[1]) for line in _metrics_of(router) if "own_lag_max" in line)
    return [f"the router's event loop has worked for {longest_s:.2f} s in a turn"] * (longest_s > MAX_OWN_LAG_S)


def sniff_hello(relay: Relay, model: Path) -> Hello:
    """What a decode node says of itself: one is started for that, and dials this process instead of a router."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    listener, address = links.listen(context, zmq.ROUTER, "127.0.0.1", 0, LinkSettings())
    before = relay.router.ready["control_address"]
    relay.router.ready["control_address"] = address
    node = relay.launch("decode", model=model)
    relay.router.ready["control_address"] = before
    try:
        assert listener.poll(120_000), "a node did not say hello"
        hello = NODE_TO_ROUTER.decode(listener.recv_multipart()[-1])
        assert isinstance(hello, Hello)
        return hello
    finally:
        node.kill()
        context.destroy(linger=0)


def main(arguments: Sequence[str]) -> int:
    """Run both phases; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kv-transport", choices=("shm", "zmq", "nixl"), default="zmq")
    parser.add_argument("--only", choices=("plaintext", "keys"), help="run one of the two")
    options = parser.parse_args(arguments)
    names = [options.only] if options.only else ["plaintext", "keys"]
    faults: list[str] = []
    with tempfile.TemporaryDirectory(prefix="baton-fuzz-") as folder:
        model = make_checkpoint(Path(folder) / "model", "llama")
        for name in names:
            phase = Phase(name, model, Path(folder) / name, options.kv_transport, has_keys=name == "keys")
            try:
                hello = sniff_hello(phase.relay, model)
                faults += phase.run(hello, options.minutes * 60 / len(names), options.seed)
            finally:
                phase.relay.close()
    for fault in faults:
        _say(f"does not hold: {fault}")
    _say(f"seed {options.seed}, {options.minutes:g} minutes: {'FAILED' if faults else 'everything holds'}")
    return 1 if faults else 0


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
