"""`python -m tests.system.two_routers`: one of two routers is killed or frozen while both stream, on real processes.

Starts `baton serve --routers 2 --prefill 2 --decode 2`. Each round streams at both routers, and then kills the second
one (SIGKILL of its life, or with `--whole` of the process that forks its lives too, or with `--freeze-s` SIGSTOP for so
long). The streams of the first router must have the same tokens as undisturbed ones, and no attempt more; of the second
router nothing may be left at the nodes, where free and cached blocks are the whole pool at the end, and it must serve
again. Streams of a router that was frozen go on or end within `LATE_S` of its return. The longest pause stands beside
that of undisturbed streams, because on a busy machine every stream pauses.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import psutil

from tests.checkpoints import make_checkpoint
from tests.system.harness import MODEL_NAME, Metrics, Stream, wait_until
from tests.system.reference import make_prompt
from tests.system.serve import Serve, serving

NUM_BEFORE = 30
"""Tokens that every stream has before the fault."""
LATE_S = 5.0
_METRICS = "metrics of "


@dataclass(frozen=True, slots=True)
class Streamed:
    """What a client has had. `error`: how its stream broke off; "" for one that came to its end. `moments_s`: when
    tokens came, and when it ended."""

    token_ids: tuple[int, ...]
    longest_pause_s: float
    error: str
    moments_s: tuple[float, ...]

    def late_s(self, after_s: float) -> float:
        """How long after a moment something came, or it ended; 0 if it had ended before."""
        return next((moment_s - after_s for moment_s in self.moments_s if moment_s > after_s), 0.0)


@dataclass(frozen=True, slots=True)
class Trial:
    """A deployment that runs, and what is asked of it."""

    serve: Serve
    addresses: dict[str, str]
    num_streams: int
    num_tokens: int

    def ask(self, router: str, number: int, reached: list[int]) -> Streamed:
        """Stream prompt `number`. `reached`: how many tokens each prompt has."""
        request: dict[str, Any] = {
            "model": MODEL_NAME,
            "prompt": list(make_prompt(200, number)),
            "max_tokens": self.num_tokens,
            "temperature": 1.0,
            "seed": number,
            "stream": True,
            "extra_body": {"return_token_ids": True, "ignore_eos": True},
        }
        url, error = f"{self.addresses[router]}/v1", ""
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120.0) as client:
            stream = Stream(client.completions.create(**request))
            try:
                for count in range(1, self.num_tokens + 1):
                    stream.read(count)
                    reached[number] = count
                stream.read_all()
            except Exception as broken:  # whatever a client sees of a router that died
                error = type(broken).__name__
        pauses = [second - first for first, second in pairwise(stream.arrivals_s[NUM_BEFORE // 2 :])]
        moments_s = (*stream.arrivals_s, time.monotonic())
        return Streamed(stream.answer().token_ids, max(pauses, default=0.0), error, moments_s)

    def stream_at_both(self, threads: ThreadPoolExecutor, first: int) -> list[Future[Streamed]]:
        """Begin prompts from number `first` on, half of them at each router; returns when all have begun."""
        reached = [0] * (first + 2 * self.num_streams)
        futures = [
            threads.submit(self.ask, router, first + place + half * self.num_streams, reached)
            for half, router in enumerate(("router-0", "router-1"))
            for place in range(self.num_streams)
        ]
        wait_until(lambda: min(reached[first:]) >= NUM_BEFORE, "all streams have begun", 120.0)
        return futures

    def second_router(self) -> psutil.Process:
        """The process that forks its lives. It was started after the first router's, which is never hurt."""
        children = psutil.Process(self.serve.process.pid).children()
        return max((each for each in children if "baton.router" in each.cmdline()), key=psutil.Process.create_time)

    def num_running(self) -> int:
        """Requests in the batches of all nodes."""
        return sum(self._of_nodes("num_requests_running"))

    def held(self) -> list[str]:
        """Nodes that hold blocks, or have lost some."""
        wrong = []
        for name, metrics in self._nodes().items():
            states = {state: metrics.value("kv_blocks", state=state) for state in ("free", "cached", "held")}
            if states["held"] or states["free"] + states["cached"] != metrics.value("kv_blocks"):
                wrong.append(f"{name}: {states}")
        return wrong

    def retries(self) -> int:
        """Attempts that the first router has begun again."""
        return Metrics(self.addresses["router-0"]).value("relay_retries_total")

    def _nodes(self) -> dict[str, Metrics]:
        return {name: Metrics(each) for name, each in self.addresses.items() if not name.startswith("router")}

    def _of_nodes(self, name: str) -> list[int]:
        return [metrics.value(name) for metrics in self._nodes().values()]


def main() -> None:
    """Run the rounds, and write a line for each."""
    parser = argparse.ArgumentParser(prog="python -m tests.system.two_routers", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=4, help="at each router")
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--whole", action="store_true", help="kill the process that forks the lives too")
    parser.add_argument("--freeze-s", type=float, default=0.0, help="freeze the router instead of killing it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="two-routers-") as folder:
        model = make_checkpoint(Path(folder) / "tiny", "llama", max_position=4096)
        flags = ("--served-model-name", MODEL_NAME, "--routers", "2", "--prefill", "2", "--decode", "2")
        with serving(Path(folder), str(model), *flags, "--batch-invariant") as serve:
            trial = _open(serve, options.streams, options.tokens)
            with ThreadPoolExecutor(2 * options.streams + 1) as threads:
                for number in range(options.rounds):
                    _round(trial, threads, number, options)
            serve.signal(signal.SIGTERM)
            status = serve.wait_exit()
    _say(f"exit status {status}")


def _open(serve: Serve, num_streams: int, num_tokens: int) -> Trial:
    lines = [line.removeprefix(_METRICS) for line in serve.out.splitlines() if line.startswith(_METRICS)]
    addresses = dict(line.removesuffix("/metrics").split(": ", 1) for line in lines)
    return Trial(serve, addresses, num_streams, num_tokens)


def _round(trial: Trial, threads: ThreadPoolExecutor, number: int, options: argparse.Namespace) -> None:
    first = 2 * trial.num_streams * number
    undisturbed = _results(trial.stream_at_both(threads, first))
    num_retries = trial.retries()
    futures = trial.stream_at_both(threads, first)
    begun_s = time.monotonic()
    thawed = _break(trial, threads, options)
    wait_until(lambda: trial.num_running() <= trial.num_streams or futures[0].done(), "its requests are gone", 60.0)
    gone_s, went_on = time.monotonic() - begun_s, not futures[0].done()
    found = _results(futures)
    own, others = found[: trial.num_streams], found[trial.num_streams :]
    if [each.token_ids for each in own] != [each.token_ids for each in undisturbed[: trial.num_streams]]:
        sys.exit(f"round {number}: the tokens of a stream at the other router differ")
    if any(each.error for each in own) or trial.retries() != num_retries:
        sys.exit(f"round {number}: a stream at the other router failed or began again")
    for each, whole in zip(others, undisturbed[trial.num_streams :], strict=True):
        if each.token_ids != whole.token_ids[: len(each.token_ids)]:
            sys.exit(f"round {number}: tokens of the router that broke differ")
    late_s = max(each.late_s(thawed.result()) for each in others)
    if options.freeze_s and late_s > LATE_S:
        sys.exit(f"round {number}: a stream stood for {late_s:.1f} s after the router was back")
    wait_until(lambda: not trial.held(), lambda: f"all blocks are free: {trial.held()}", 30.0)
    pause_ms, usual_ms = (1000 * max(each.longest_pause_s for each in some) for some in (own, undisturbed))
    ends = sorted({each.error or "whole" for each in others})
    when = f"its requests were gone after {gone_s:.2f} s" if went_on else "the others ended before it was looked at"
    when = f"back after {options.freeze_s:g} s" if options.freeze_s else when
    _say(
        f"round {number}: {len(own)} streams exact, longest pause {pause_ms:.0f} ms, undisturbed {usual_ms:.0f} ms; "
        f"at the other router: {', '.join(ends)}, {late_s:.2f} s after it was back; {when}"
    )


def _break(trial: Trial, threads: ThreadPoolExecutor, options: argparse.Namespace) -> Future[float]:
    """Kill or freeze the second router. The moment when that was over."""
    process = trial.second_router()
    (life,) = process.children()
    if options.freeze_s:
        os.kill(life.pid, signal.SIGSTOP)
        return threads.submit(_thaw, life, options.freeze_s)
    if options.whole:
        os.kill(process.pid, signal.SIGKILL)
    os.kill(life.pid, signal.SIGKILL)
    over: Future[float] = Future()
    over.set_result(time.monotonic())
    return over


def _thaw(life: psutil.Process, after_s: float) -> float:
    time.sleep(after_s)
    os.kill(life.pid, signal.SIGCONT)
    return time.monotonic()


def _results(futures: Sequence[Future[Streamed]]) -> list[Streamed]:
    return [future.result(300.0) for future in futures]


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
