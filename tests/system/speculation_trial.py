"""`python -m tests.system.speculation_trial TRIAL --model FOLDER`: what drafts save the clients of real relays.

`alone`: one request at a time, of work that copies and of chat. `load`: several streams at once, half of them copying,
with a goal of `--goal` times the TPOT of a request alone. Relays of `--method NAME=CONFIG` and one without drafts take
each request one after the other. Each answer has the tokens that it has without drafts, or the trial fails. A method
named "prediction" is sent the text that is copied, as editors send it.

With `--peer 'NAME=COMMAND @ URL'` other servers have the same requests too. They stand still while others are asked.
"PEER: METHOD" is held against "PEER". TPOT is (last - first) / (tokens - 1) at the client.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import openai
import psutil

from baton.bench.numbers import number, rate
from tests.measured import add_to, report
from tests.system.harness import MODEL_NAME, REQUEST_TIMEOUT_S, Node, Relay, start_relay, wait_until
from tests.system.parallel_grid import say
from tests.system.prepared import die_with_parent
from tests.system.speculation_work import KINDS, PROSE, Task, mixture

PLAIN, PREDICTION = "Baton", "prediction"
_ALL_COPYING = "all that copies"
_PEER_START_S = 400.0
_POOL = ("--kv-cache-memory-bytes", str(2**30))
_NO_DRAFTS = ("--speculative-config", "none")
_NO_GOAL_MS = 1e6
_WARM_UP = 900
"""Numbers of tasks that nobody measures begin here."""


@dataclass(frozen=True, slots=True)
class Answer:
    """As its client saw it. `token_ids` and the drafted tokens that were right: of Baton alone."""

    num_tokens: int
    ttft_s: float
    tpot_s: float
    token_ids: tuple[int, ...]
    text: str
    num_accepted: int = 0

    @property
    def measured(self) -> tuple[float, float, int, int]:
        """What a line keeps of it."""
        return self.tpot_s, self.ttft_s, self.num_tokens, self.num_accepted


@dataclass(frozen=True, slots=True)
class Server:
    """A relay or a peer. `processes`: of a peer, which is not idle while it is not asked."""

    client: openai.OpenAI
    model: str
    relay: Relay | None = None
    processes: tuple[psutil.Process, ...] = ()
    has_predictions: bool = False

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Let it run, alone; when this ends, nothing is in flight."""
        self._signal(signal.SIGCONT)
        yield
        if self.relay is not None:
            self.relay.settle()
        self._signal(signal.SIGSTOP)

    def num_accepted(self) -> int:
        """Drafted tokens of a relay that were right, so far."""
        with suppress(KeyError):
            return sum(node.metrics().value("spec_decode_num_accepted_tokens_total") for node in self._nodes)
        return 0

    def ask(self, task: Task, max_tokens: int, goal_ms: float = _NO_GOAL_MS) -> Answer:
        """One greedy chat turn that ends where the model ends it."""
        options: dict[str, Any] = {}
        if self.relay is not None:
            options["extra_body"] = {"return_token_ids": True, "goal_tpot_ms": goal_ms}
        if self.has_predictions and task.copied:
            options["prediction"] = {"type": "content", "content": task.copied}
        begun_s = time.monotonic()
        with self.client.chat.completions.create(
            model=self.model,
            messages=[{"role": "user", "content": task.question}],
            max_tokens=max_tokens,
            temperature=0.0,
            stream=True,
            stream_options={"include_usage": True},
            **options,
        ) as chunks:
            return _read(chunks, begun_s)

    @property
    def _nodes(self) -> Sequence[Node]:
        return () if self.relay is None else self.relay.decodes

    def _signal(self, number: int) -> None:
        for process in self.processes:
            process.send_signal(number)


def _read(chunks: Any, begun_s: float) -> Answer:
    arrivals_s, text, token_ids, usage = [], "", list[int](), None
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            token_ids.extend((choice.model_extra or {}).get("token_ids") or ())
            text += choice.delta.content or ""
            if choice.delta.content or choice.finish_reason:
                arrivals_s.append(time.monotonic())
    assert usage is not None, "the answer does not say how many tokens it has"
    tpot_s = (arrivals_s[-1] - arrivals_s[0]) / max(1, usage.completion_tokens - 1)
    return Answer(usage.completion_tokens, arrivals_s[0] - begun_s, tpot_s, tuple(token_ids), text)


@contextmanager
def relay_of(model: Path, layout: str, flags: Sequence[str], has_predictions: bool = False) -> Iterator[Server]:
    """A relay of a prefill and a decode node with a core each, or of one node of both legs on all cores."""
    split: Sequence[Sequence[str]] = ((*_POOL, *flags),) if layout == "split" else ()
    router = ("--goal-tpot-ms", str(_NO_GOAL_MS), "--min-goal-tpot-ms", "0.1")
    with tempfile.TemporaryDirectory(prefix="baton-drafts-") as folder, ExitStack() as exits:
        relay = start_relay(model, Path(folder), prefill=split, decode=split, router=router)
        exits.callback(relay.close)
        if not split:
            both = ("--role", "both", "--num-threads", "0", *_POOL, *flags)
            relay.join(relay.launch("decode", *both, script=("-m", "baton.node")))
        yield Server(relay.client, MODEL_NAME, relay, has_predictions=has_predictions)


@contextmanager
def peer_of(command: str, url: str) -> Iterator[Server]:
    """What `command` serves at `url`, until this ends."""
    with tempfile.TemporaryFile() as said:
        started = subprocess.Popen(shlex.split(command), stdout=said, stderr=said, preexec_fn=die_with_parent)
    try:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=REQUEST_TIMEOUT_S, max_retries=0)
        wait_until(lambda: _answers(client, started), f"{command} answers at {url}", _PEER_START_S)
        processes = (psutil.Process(started.pid), *psutil.Process(started.pid).children(recursive=True))
        yield Server(client, client.models.list().data[0].id, None, processes)
    finally:
        for process in (*psutil.Process(started.pid).children(recursive=True), psutil.Process(started.pid)):
            process.kill()


def _answers(client: openai.OpenAI, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None, f"{process.args!r} has ended"
    try:
        client.models.list()
    except openai.APIError:
        return False
    return True


def start_servers(arguments: argparse.Namespace, exits: ExitStack) -> dict[str, Server]:
    """Those of the command line, by name. Whoever has to stand still does."""
    servers = {}
    if not arguments.only_peers:
        servers[PLAIN] = exits.enter_context(
            relay_of(arguments.model, arguments.layout, (*arguments.flag, *_NO_DRAFTS))
        )
        for name, config in (each.split("=", 1) for each in arguments.method):
            flags = (*arguments.flag, "--speculative-config", config)
            relay = relay_of(arguments.model, arguments.layout, flags, name == PREDICTION)
            servers[f"{PLAIN}: {name}"] = exits.enter_context(relay)
    for name, command in (each.split("=", 1) for each in arguments.peer):
        servers[name] = exits.enter_context(peer_of(*command.rsplit(" @ ", 1)))
        with servers[name].awake():
            pass
    for server in servers.values():
        with server.awake():
            for number_, make in enumerate(KINDS.values(), _WARM_UP):
                server.ask(make(number_), 32)
    return servers


def base_of(name: str, servers: Mapping[str, Server]) -> str:
    """The server that `name` is held against: the same program without drafts."""
    base = name.split(": ")[0]
    return base if base in servers else name


def against(base_s: Sequence[float], other_s: Sequence[float]) -> str:
    """The median of TPOTs, and what they are of those that were measured in turns with them: median and range."""
    # an answer of one token has no time between tokens
    ratios = [other / base for base, other in zip(base_s, other_s, strict=True) if base]
    middle = f"{number(1000 * statistics.median(other_s))} ms"
    if base_s == other_s:
        return middle
    return f"{middle} ({rate(statistics.median(ratios))}, {rate(min(ratios))} to {rate(max(ratios))})"


def alone(arguments: argparse.Namespace) -> None:
    """Each kind of work, one request at a time."""
    answers = defaultdict[str, dict[str, list[Answer]]](lambda: defaultdict(list))
    with ExitStack() as exits:
        servers = start_servers(arguments, exits)
        for round_ in range(arguments.rounds):
            for kind in arguments.kind or KINDS:
                for name in in_turns(servers, round_):
                    answer = asked_alone(servers[name], KINDS[kind](round_), arguments.max_tokens)
                    answers[kind][name].append(answer)
                    say(f"{round_} {kind}, {name}: {_told(answer)}{arguments.texts * f' {answer.text}'}")
                require_same({name: each[-1:] for name, each in answers[kind].items()}, kind)
    tpots = {kind: {name: [each.tpot_s for each in of[name]] for name in servers} for kind, of in answers.items()}
    copying = [of for kind, of in tpots.items() if kind not in PROSE]
    if copying:
        tpots[_ALL_COPYING] = {name: [tpot for of in copying for tpot in of[name]] for name in servers}
    cells = {
        f"{_title(arguments)}: {kind}": {name: against(of[base_of(name, servers)], of[name]) for name in servers}
        for kind, of in tpots.items()
    }
    values = {kind: {name: [each.measured for each in got] for name, got in of.items()} for kind, of in answers.items()}
    report(arguments.title or "alone", cells, values, arguments.to)


def in_turns(servers: Mapping[str, Server], round_: int) -> list[str]:
    """The names in the order of a round, which is turned around in each."""
    return list(servers) if round_ % 2 == 0 else [*servers][::-1]


def asked_alone(server: Server, task: Task, max_tokens: int) -> Answer:
    """The answer, with what the nodes count of its drafts."""
    with server.awake():
        before = server.num_accepted()
        answer = server.ask(task, max_tokens)
        return replace(answer, num_accepted=server.num_accepted() - before)


def require_same(answers: Mapping[str, Sequence[Answer]], what: str) -> None:
    """Fail where tokens of Baton differ from those without drafts."""
    for name, got in answers.items():
        if name.startswith(f"{PLAIN}: "):
            for mine, plain in zip(got, answers[PLAIN], strict=True):
                assert mine.token_ids == plain.token_ids, f"{what}: {name} has other tokens than without drafts"


def load(arguments: argparse.Namespace) -> None:
    """Half copying and half prose, by as many streams as there are."""
    tpots = defaultdict[int, dict[str, list[float]]](lambda: defaultdict(list))
    goods = defaultdict[int, dict[str, list[float]]](lambda: defaultdict(list))
    goal_ms = arguments.goal_ms
    with ExitStack() as exits:
        servers = start_servers(arguments, exits)
        for round_, num_streams in product(range(arguments.rounds), arguments.streams):
            tasks, found = mixture(100 * round_ + num_streams, max(4, arguments.tasks * num_streams)), {}
            for name in in_turns(servers, round_):
                with servers[name].awake():
                    found[name], took_s = ask_all(servers[name], tasks, num_streams, arguments.max_tokens, goal_ms)
                tpot_s = statistics.median(each.tpot_s for each in found[name])
                goal_ms = goal_ms or 1000 * arguments.goal * tpot_s  # of a relay without drafts, the first one
                num_good = sum(each.tpot_s <= goal_ms / 1000 for each in found[name])
                tpots[num_streams][name].append(tpot_s)
                goods[num_streams][name].append(num_good / took_s)
                told = f"TPOT {1000 * tpot_s:.1f} ms, {num_good} of {len(tasks)} good, {took_s:.1f} s"
                say(f"{round_} {num_streams} streams, {name}: {told}")
            require_same(found, f"{num_streams} streams")
    rows = {f"{_title(arguments)}, {each} stream{'s' if each > 1 else ''}": each for each in arguments.streams}
    cells = {
        f"{row}: {what}": {name: show(of[each][base_of(name, servers)], of[each][name]) for name in servers}
        for row, each in rows.items()
        for what, of, show in (("TPOT p50", tpots, against), ("goodput", goods, _goodput))
    }
    report(arguments.title or "load", cells, {"goal_ms": goal_ms, "tpots": tpots, "goods": goods}, arguments.to)


def ask_all(
    server: Server, tasks: Sequence[Task], num_streams: int, max_tokens: int, goal_ms: float
) -> tuple[list[Answer], float]:
    """The answers to all tasks, so many at once, and the seconds until the last one."""
    begun_s = time.monotonic()
    with ThreadPoolExecutor(num_streams) as threads:
        answers = list(threads.map(lambda task: server.ask(task, max_tokens, goal_ms or _NO_GOAL_MS), tasks))
    return answers, time.monotonic() - begun_s


def _goodput(base: Sequence[float], other: Sequence[float]) -> str:
    middle = f"{number(60 * statistics.median(other))}/min"
    ratios = [mine / theirs for theirs, mine in zip(base, other, strict=True) if theirs]
    return middle if base == other or not ratios else f"{middle} ({rate(statistics.median(ratios))})"


def _told(answer: Answer) -> str:
    return (
        f"{1000 * answer.tpot_s:.1f} ms, {answer.num_tokens} tokens, {answer.num_accepted} accepted, "
        f"TTFT {1000 * answer.ttft_s:.0f} ms"
    )


def _title(arguments: argparse.Namespace) -> str:
    return f"{arguments.model.name}, {arguments.layout}"


def parser_of() -> argparse.ArgumentParser:
    """The flags of both trials."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.system.speculation_trial",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("trial", choices=("alone", "load"))
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--layout", choices=("split", "mixed"), default="split")
    parser.add_argument("--method", action="append", default=[], metavar="NAME=CONFIG", help="a relay with drafts")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND @ URL", help="another server")
    parser.add_argument("--only-peers", action="store_true", help="start no relay")
    parser.add_argument("--flag", action="append", default=[], help="of every node, as in --flag=--dtype=float32")
    parser.add_argument("--kind", action="append", choices=KINDS, default=[], help="of `alone`; all if none is named")
    parser.add_argument("--streams", type=int, nargs="+", default=(1, 4, 16), help="of `load`")
    parser.add_argument("--tasks", type=int, default=2, help="of each stream of `load`")
    parser.add_argument("--goal", type=float, default=1.5, help="times the first TPOT that `load` measures")
    parser.add_argument("--goal-ms", type=float, default=0.0, help="a goal in its place")
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--texts", action="store_true", help="print the answers")
    parser.add_argument("--title", default="", help="of the table, in place of the trial's name")
    add_to(parser)
    return parser


def main() -> None:
    """Run what is named."""
    arguments = parser_of().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no process is left
    {"alone": alone, "load": load}[arguments.trial](arguments)


if __name__ == "__main__":
    main()
