"""`python -m tests.system.kv_trial TRIAL --model FOLDER`: what KV that outlives its request saves real relays.

`turns`: a chat, whose answers nobody computes again where the router looks at caches. Two relays of one prefill node
and one decode node take each turn one after the other; policies that do not look at caches are all that they differ
in. With `--peer`, a command that starts vLLM on port 8100 and says "ready", vLLM has the same chat too. It stands still
while others are asked.

`memory`: prompts that the pool has forgotten and host memory has, and vLLM with LMCache as its `--peer`.

`restart`: a node with a folder and one without are killed and started again, and asked for a prompt that both have
seen. Files are not in the page cache then. Times are to the first token, as clients see them.
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import openai
import psutil

from baton.bench.numbers import number
from tests.engine.offload_time import LINGER_S, cool
from tests.measured import add_to, against, ratio, report
from tests.system.harness import REQUEST_TIMEOUT_S, Relay, Stream, start_relay, wait_until
from tests.system.parallel_grid import say
from tests.system.prepared import die_with_parent

COMPUTED, REUSED, PEER = "computed", "reused", "vLLM"
_BATON, _LMCACHE = "Baton", "vLLM with LMCache"
_FOLDER, _NO_FOLDER = "with a folder", "without one"
_NO_CACHES = ("--prefill-policy", "least_loaded", "--decode-policy", "least_loaded")
_PEER_PORT = 8100
_PEER_START_S = 400.0
_SAVE_S = 2.0
"""The peer saves behind its answer."""
_NEW = 40
_WARMING = (64, 128, 256, 512, 1000, 1000)
"""Prompts from which nodes learn what prompts cost."""
_MOST_ID = 7900
_LEAST_ID = 300


def fresh(chance: random.Random, num_tokens: int) -> list[int]:
    """Tokens that every vocabulary has, and nobody has seen together."""
    return [chance.randrange(_LEAST_ID, _MOST_ID) for _ in range(num_tokens)]


@dataclass(frozen=True, slots=True)
class Server:
    """A relay or a peer, as its clients see it. `processes`: of a peer, which is not idle while it is not asked."""

    client: openai.OpenAI
    model: str
    relay: Relay | None = None
    processes: tuple[psutil.Process, ...] = ()

    def ask(self, prompt: Sequence[int], num_tokens: int = 1) -> tuple[float, tuple[int, ...]]:
        """Seconds to the first token, and all tokens; when this returns, nothing is in flight."""
        self._signal(signal.SIGCONT)
        extra = {"return_token_ids": True, "ignore_eos": True}
        if self.relay is not None:
            extra["detokenize"] = False  # tokens of random weights may be no text for long
        begun_s = time.monotonic()
        with self.client.completions.create(
            model=self.model, prompt=list(prompt), max_tokens=num_tokens, temperature=0.0, stream=True, extra_body=extra
        ) as chunks:
            stream = Stream(chunks)
            stream.read_all()
        if self.relay is not None:
            self.relay.settle()
        self._signal(signal.SIGSTOP)
        return stream.arrivals_s[0] - begun_s, stream.answer().token_ids

    def warm_up(self) -> None:
        """Have it compute prompts that do not return."""
        chance = random.Random(99)
        for num_tokens in _WARMING:
            self.ask(fresh(chance, num_tokens), 4)

    def forget(self, other: Sequence[int]) -> None:
        """Have its pool forget what it has, by another prompt of its size if need be; host memory has it then."""
        if self.relay is not None:
            self.ask(other)
            return
        self._signal(signal.SIGCONT)
        time.sleep(_SAVE_S)
        self.client.post(f"http://127.0.0.1:{_PEER_PORT}/reset_prefix_cache", cast_to=object)
        self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        for process in self.processes:
            process.send_signal(number)


@contextmanager
def relay_of(
    model: Path, flags: Sequence[str], router: Sequence[str] = (), legs: Sequence[Sequence[str]] = ((),)
) -> Iterator[Server]:
    """A relay of one prefill node and one decode node, or of none at all."""
    with tempfile.TemporaryDirectory(prefix="baton-kv-") as folder, ExitStack() as exits:
        nodes = [(*flags, *leg) for leg in legs]
        relay = start_relay(model, Path(folder), prefill=nodes, decode=nodes, router=router)
        exits.callback(relay.close)
        yield Server(relay.client, "tiny", relay)


@contextmanager
def peer_of(command: str, model: Path) -> Iterator[Server]:
    """What `command` serves, until this ends."""
    environment = {**os.environ, "MAX_LEN": "8192"}
    with subprocess.Popen(
        shlex.split(command.format(model=model)),
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=die_with_parent,
    ) as started:
        try:
            assert started.stdout is not None
            assert any(line.startswith("ready") for line in started.stdout), "the peer did not start"
            client = openai.OpenAI(
                base_url=f"http://127.0.0.1:{_PEER_PORT}/v1", api_key="none", timeout=REQUEST_TIMEOUT_S
            )
            processes = tuple(psutil.Process(started.pid).children(recursive=True))
            yield Server(client, client.models.list().data[0].id, None, processes)
        finally:
            for process in (*psutil.Process(started.pid).children(recursive=True), psutil.Process(started.pid)):
                process.kill()


def chat(servers: Mapping[str, Server], seed: int, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds to the first token of each turn, by server. All relays give the same answers."""
    chance = random.Random(seed)
    history = dict.fromkeys(servers, fresh(chance, arguments.first))
    found = defaultdict[str, list[float]](list)
    for turn in range(1, arguments.turns + 1):
        order = list(servers) if turn % 2 else [*servers][::-1]
        new = fresh(chance, _NEW)
        for name in order:
            seconds, answer = servers[name].ask(history[name], arguments.answer if turn < arguments.turns else 1)
            found[name].append(seconds)
            history[name] = [*history[name], *answer, *new]
        assert history[COMPUTED] == history[REUSED], "other tokens"
    return found


def turns(arguments: argparse.Namespace) -> None:
    """Chats with relays in turns, and with a peer if there is one."""
    rounds = defaultdict[str, list[list[float]]](list)
    flags = ("--kv-cache-memory-bytes", str(arguments.pool_bytes))
    with ExitStack() as exits:
        reusing = exits.enter_context(relay_of(arguments.model, flags))
        servers = {COMPUTED: exits.enter_context(relay_of(arguments.model, flags, _NO_CACHES)), REUSED: reusing}
        if arguments.peer:
            servers[PEER] = exits.enter_context(peer_of(arguments.peer, arguments.model))
        for server in servers.values():
            server.warm_up()
        for seed in range(arguments.rounds):
            for name, seconds in chat(servers, seed, arguments).items():
                rounds[name].append(seconds)
                say(f"{arguments.model.name} {name}: {', '.join(number(1000 * each) for each in seconds)} ms")
        say(_ways(reusing))
    # by turn, the seconds of each round
    times = {name: list(zip(*each, strict=True)) for name, each in rounds.items()}
    lengths = range(arguments.first, 10**6, arguments.answer + _NEW)
    cells = {
        f"{arguments.model.name}, {name}": {
            f"{turn + 1}: {lengths[turn]:,} tokens": against(times[COMPUTED][turn], each[turn])
            for turn in range(arguments.turns)
        }
        for name, each in times.items()
    }
    report("turn", cells, rounds, arguments.to)
    shares = [ratio(*each) for each in zip(times[COMPUTED], times[REUSED], strict=True)][1:]
    say(f"turns 2 to {arguments.turns}: {statistics.median(shares):.2f} at the median, {max(shares):.2f} at most")


def _ways(server: Server) -> str:
    """Which ways the turns went."""
    assert server.relay is not None
    metrics = server.relay.router.metrics()
    return f"{metrics.value('prefix_stays_total')} stays, {metrics.value('prefix_pulls_total')} pulls"


def restart(arguments: argparse.Namespace) -> None:
    """A node that is killed, with a folder and without, in turns."""
    times = defaultdict[str, dict[str, list[float]]](lambda: defaultdict(list))
    num_blocks = arguments.first // 16 + 8
    with tempfile.TemporaryDirectory(prefix="baton-kv-") as folder, ExitStack() as exits:
        flags = {
            _FOLDER: ("--num-blocks", str(num_blocks), "--kv-disk", folder, "--kv-disk-size", "4"),
            _NO_FOLDER: ("--num-blocks", str(num_blocks)),
        }
        servers = {name: exits.enter_context(relay_of(arguments.model, (), legs=())) for name in flags}
        for name, server in servers.items():
            start_node(server, flags[name])
            server.warm_up()
        for seed in range(arguments.rounds):
            prompt, *others = (fresh(random.Random(str((seed, each))), arguments.first) for each in range(3))
            for name, server in servers.items():
                times["nobody has it"][name].append(server.ask(prompt)[0])
                times["in the pool"][name].append(server.ask(prompt)[0])
                for other in others:  # they push it out
                    server.ask(other)
            time.sleep(LINGER_S)
            for name, server in servers.items():
                kill_node(server)
                cool(folder)
                start_node(server, flags[name])
                times["first after kill -9"][name].append(server.ask(prompt)[0])
    cells = {
        f"{arguments.model.name}, {arguments.first:,} tokens: {state}": {
            name: against(found[_NO_FOLDER], each) for name, each in found.items()
        }
        for state, found in times.items()
    }
    report("restart", cells, times, arguments.to)


def memory(arguments: argparse.Namespace) -> None:
    """Prompts that nobody has, and the same again when only host memory has them."""
    times = defaultdict[str, dict[str, list[float]]](lambda: defaultdict(list))
    flags = ("--num-blocks", str(arguments.first // 16 + 8), "--kv-offloading-size", "2", "--num-threads", "0")
    with ExitStack() as exits:
        servers = {_BATON: exits.enter_context(relay_of(arguments.model, (), legs=()))}
        start_node(servers[_BATON], flags)
        if arguments.peer:
            servers[_LMCACHE] = exits.enter_context(peer_of(arguments.peer, arguments.model))
        for server in servers.values():
            server.warm_up()
        for seed in range(arguments.rounds):
            chance = random.Random(seed)
            prompt, other = fresh(chance, arguments.first), fresh(chance, arguments.first)
            for name, server in servers.items():
                times["nobody has it"][name].append(server.ask(prompt)[0])
                server.forget(other)
                times["in host memory"][name].append(server.ask(prompt)[0])
    cells = {
        f"{arguments.model.name}, {arguments.first:,} tokens: {state}": {
            name: against(times["nobody has it"][name], each) for name, each in found.items()
        }
        for state, found in times.items()
    }
    report("memory", cells, times, arguments.to)


def start_node(server: Server, flags: Sequence[str]) -> None:
    """Start a node of both legs."""
    assert server.relay is not None
    server.relay.join(server.relay.launch("decode", "--role", "both", *flags, script=("-m", "baton.node")))


def kill_node(server: Server) -> None:
    """SIGKILL, and wait until the router has noticed."""
    relay = server.relay
    assert relay is not None
    relay.nodes.pop().kill()
    wait_until(lambda: relay.router.metrics().value("nodes") == 0, "the router knows that the node is gone", 60.0)


def main() -> None:
    """Run what is named."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.system.kv_trial",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("trial", choices=("turns", "restart", "memory"))
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--first", type=int, default=1000, help="tokens of the first prompt")
    parser.add_argument("--answer", type=int, default=400, help="tokens of an answer")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pool-bytes", type=int, default=2**30)
    parser.add_argument("--peer", metavar="COMMAND", help="starts vLLM with the checkpoint {model}")
    add_to(parser)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no process is left
    {"turns": turns, "restart": restart, "memory": memory}[arguments.trial](arguments)


if __name__ == "__main__":
    main()
