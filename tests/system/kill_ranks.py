"""Killing each rank of each node of a `baton serve` under load: `python -m tests.system.kill_ranks`.

Every node has two ranks, or those of `--ranks 2x2`: two in each of two stages; with `--rank-pools own` each of them
has a pool of its own. For each process of the ranks, drivers
among them: streams run, it gets SIGKILL, and then

- its node ends within 5 s, and says in one line of the log which rank ended it; with `--stop` the ranks get SIGSTOP,
  drivers excepted, and the node has as long as a step may take in addition;
- every stream goes on elsewhere, or waits for the node that comes back, and has the tokens of transformers;
- the supervisor starts the node again, and no node that lived on holds a block.

At the end SIGINT ends everything with status 0, and no process, segment or port is left.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import openai
import psutil

from baton.engine.settings import OWN, SHARED
from baton.ranks.executor.leading import LEAST_S
from tests.checkpoints import make_checkpoint
from tests.system.harness import MODEL_NAME, REQUEST_TIMEOUT_S, Metrics, Stream, wait_until
from tests.system.parallel_grid import ranks_of as flags_of
from tests.system.parallel_grid import say
from tests.system.reference import Reference, make_prompt
from tests.system.serve import Serve, serving

END_S = 5.0
_BACK_S = 90.0
_NUM_STREAMS = 6
_NUM_TOKENS = 48
_RANK = "baton.ranks"
_NODES = ("--prefill", "1", "--decode", "2", "--num-threads", "1", "--num-blocks", "96")
_FLAGS = (*_NODES, "--served-model-name", MODEL_NAME, "--local-prefill-tokens", "0", "--max-num-batched-tokens", "24")


def nodes_of(program: Serve) -> dict[str, psutil.Process]:
    """The drivers by the names of their nodes."""
    found = {}
    for child in psutil.Process(program.process.pid).children():
        name = next((word for word in child.cmdline() if word.startswith("--node-id=")), "")
        if name:
            found[name.partition("=")[2]] = child
    return found


def ranks_of(node: psutil.Process) -> list[psutil.Process]:
    """Its ranks, the driver first."""
    ranks = [child for child in node.children() if _RANK in child.cmdline()]
    return [node, *sorted(ranks, key=lambda child: (child.create_time(), child.pid))]


def addresses(program: Serve) -> dict[str, str]:
    """Where each node had its metrics when everything had started."""
    return dict(re.findall(r"^metrics of (\S+): (\S+)/metrics$", program.out, re.MULTILINE))


def read(program: Serve, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """One stream to its end."""
    with openai.OpenAI(
        base_url=f"{program.endpoint}/v1", api_key="none", max_retries=0, timeout=REQUEST_TIMEOUT_S * 2
    ) as client:
        chunks = client.completions.create(
            model=MODEL_NAME, prompt=list(prompt), max_tokens=_NUM_TOKENS, temperature=0.0, stream=True,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )  # fmt: skip
        stream = Stream(chunks)
        stream.read_all()
        return stream.answer().token_ids


def kill_one(
    program: Serve, reference: Reference, survivors: Mapping[str, str], name: str, number: int, how: signal.Signals
) -> str:
    """Send a signal to rank `number` of node `name` under streams; what to print. `survivors`: the addresses of nodes
    that were never killed."""
    seed = len(survivors) + 4 * number
    node = nodes_of(program)[name]
    victim, others = ranks_of(node)[number], [rank for rank in ranks_of(node) if rank.pid != node.pid]
    prompts = [make_prompt(30 + 17 * index, seed) for index in range(_NUM_STREAMS)]
    expected = [reference.greedy(prompt, _NUM_TOKENS).token_ids for prompt in prompts]
    num_lines = len(program.err.splitlines())
    with ThreadPoolExecutor(_NUM_STREAMS) as threads:
        num_before = _NUM_STREAMS if how == signal.SIGKILL else _NUM_STREAMS // 2
        answers = [threads.submit(read, program, prompt) for prompt in prompts[:num_before]]
        if how == signal.SIGKILL:
            time.sleep(0.4 + 0.3 * (seed % 4))
        victim.send_signal(how)
        # a rank that is stopped is noticed in a step: there has to be one in each node
        answers += [threads.submit(read, program, prompt) for prompt in prompts[num_before:]]
        begin_s = time.monotonic()
        end_s = END_S if how == signal.SIGKILL else END_S + 2 * LEAST_S
        wait_until(lambda: not any(process.is_running() for process in (node, *others)), f"{name} ended", end_s)
        ended_s = time.monotonic() - begin_s
        wait_until(
            lambda: name in nodes_of(program) and nodes_of(program)[name].pid != node.pid, f"{name} is back", _BACK_S
        )
        found = [answer.result() for answer in answers]
    assert found == expected, "a stream went on with other tokens"
    said = [line for line in program.err.splitlines()[num_lines:] if f"rank {number} of {1 + len(others)}" in line]
    assert number == 0 or len(said) == 1, said
    wait_until(lambda: counted(program), "the router counts all nodes", _BACK_S)
    for other, address in survivors.items():
        wait_until(partial(holds_nothing, address), f"{other} holds nothing")
    return f"ended after {ended_s:.1f} s, {len(found)} streams went on: {said[0].strip() if said else 'the driver'}"


def holds_nothing(address: str) -> bool:
    """Whether all blocks of a node are free or cached."""
    return not Metrics(address).value("kv_blocks", state="held")


def counted(program: Serve) -> bool:
    """Whether the router has all nodes."""
    metrics = Metrics(program.endpoint)
    return (metrics.value("nodes", role="prefill"), metrics.value("nodes", role="decode")) == (1, 2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Kill each once; 0 when all was right."""
    parser = argparse.ArgumentParser(prog="python -m tests.system.kill_ranks", description=__doc__)
    parser.add_argument("--ranks", default="2", help="of each node; 2x3: 2 in each of 3 stages")
    parser.add_argument("--rank-pools", default=SHARED, choices=(SHARED, OWN), help="of each node")
    parser.add_argument("--stop", action="store_true", help="stop ranks instead of killing them")
    asked = parser.parse_args(arguments)
    how = signal.SIGSTOP if asked.stop else signal.SIGKILL
    num_wrong = 0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = make_checkpoint(folder / "model", "llama")
        reference = Reference(model)
        with serving(folder, str(model), *_FLAGS, *flags_of(asked.ranks), "--rank-pools", asked.rank_pools) as program:
            found = {name: len(ranks_of(node)) for name, node in sorted(nodes_of(program).items())}
            cases = [(name, number) for name, count in found.items() for number in reversed(range(asked.stop, count))]
            survivors = {name: at for name, at in addresses(program).items() if name != "router"}
            for name, number in cases:
                survivors.pop(name, None)
                try:
                    said = kill_one(program, reference, survivors, name, number, how)
                except AssertionError as error:
                    num_wrong += 1
                    said = f"WRONG: {error}"
                say(f"{name}, rank {number}: {said}")
            children = program.note_footprint()
            program.signal(signal.SIGINT)
            assert program.wait_exit() == 0
            program.require_nothing_left(children)
    say("all right" if not num_wrong else f"{num_wrong} were wrong")
    return min(num_wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
