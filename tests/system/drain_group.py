"""`python -m tests.system.drain_group`: groups of nodes are restarted and drained while streams run, on real processes.

Starts `baton serve --prefill 1 --decode 2 --data-parallel-size 2`: three groups of two nodes each. Under streams that
never pause, by the commands that operators use: each group is restarted as a whole, then all nodes one after another,
then one decode group is drained for good. No request may fail; every token must be that of transformers; a group's two
nodes must leave together, and those that were restarted must be other processes afterwards. At the end no node holds a
block, and nothing is left.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil

from baton.demo.location import checkpoint_path
from baton.launch import drain, restart
from baton.launch.api_client import ApiClient
from tests.cluster.load import MODEL, Load, known_answers
from tests.system.harness import Metrics, wait_until
from tests.system.serve import Serve, serving

GROUPS = ("prefill-0", "decode-0", "decode-1")
_NUM_PROMPTS, _NUM_TOKENS = 12, 200
_FLAGS = ("--prefill", "1", "--decode", "2", "--data-parallel-size", "2", "--num-threads", "1", "--dtype", "float32")
_ROOM = ("--num-blocks", "640", "--served-model-name", MODEL, "--node-wait-s", "120")


def pids(program: Serve) -> dict[str, int]:
    """Of the nodes by their names."""
    found = {}
    for child in psutil.Process(program.process.pid).children():
        name = next((word for word in child.cmdline() if word.startswith("--node-id=")), "")
        if name:
            found[name.partition("=")[2]] = child.pid
    return found


def of_group(nodes: dict[str, int], name: str) -> dict[str, int]:
    """The nodes of a group among others."""
    return {node: pid for node, pid in nodes.items() if node.rpartition("-")[0] == name}


def ask(what: Callable[[list[str]], int], program: Serve, *arguments: str) -> None:
    """One of the operator's commands, and how long it took."""
    begin_s = time.monotonic()
    assert what([*arguments, "--url", program.endpoint]) == 0
    say(f"{what.__module__.rpartition('.')[2]} {' '.join(arguments)}: {time.monotonic() - begin_s:.1f} s")


def operate(program: Serve) -> None:
    """Everything that an operator does meanwhile."""
    for group in GROUPS:
        before = pids(program)
        ask(restart.main, program, "--rolling", group)
        after = pids(program)
        assert not set(of_group(before, group).values()) & set(of_group(after, group).values()), (before, after)
        assert of_group(before, group).keys() == of_group(after, group).keys()
        assert before.items() - of_group(before, group).items() <= after.items(), "others were restarted too"
    before = pids(program)
    ask(restart.main, program, "--rolling")
    assert not set(before.values()) & set(pids(program).values())
    ask(drain.main, program, "decode-1")
    wait_until(lambda: not of_group(pids(program), "decode-1"), "the processes of decode-1 have ended", 60.0)
    left = {str(node["id"]) for node in ApiClient(program.endpoint).nodes()}
    assert left == {f"{group}-{number}" for group in GROUPS[:2] for number in range(2)}, left


def addresses(program: Serve) -> dict[str, str]:
    """Where each node has its metrics, in its last life."""
    first = re.findall(r"^metrics of (\S+): (\S+)/metrics$", program.out, re.MULTILINE)
    return dict(first + re.findall(r"(\S+) is ready again at (\S+)$", program.err, re.MULTILINE))


def holds_nothing(address: str) -> bool:
    """Whether all blocks of a node are free or cached."""
    return not Metrics(address).value("kv_blocks", state="held")


def main() -> int:
    """Run it; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.system.drain_group", description=__doc__)
    parser.add_argument("--streams", type=int, default=6, help="at a time")
    parser.add_argument("--kv-transport", default="auto")
    options = parser.parse_args()
    answers = known_answers(checkpoint_path(), _NUM_PROMPTS, _NUM_TOKENS)
    flags = (*_FLAGS, *_ROOM, "--kv-transport", options.kv_transport)
    with tempfile.TemporaryDirectory(prefix="drain-group-") as folder, serving(Path(folder), *flags) as program:
        with Load(program.endpoint, answers, options.streams) as load:
            time.sleep(3.0)
            operate(program)
            time.sleep(3.0)
        router = Metrics(program.endpoint)
        moves, retries = router.value("relay_moves_total"), router.value("relay_retries_total")
        say(f"{load.tally}; {moves} moved, {retries} begun again")
        assert not load.tally.failures, load.tally.failures
        assert load.tally.num_right > options.streams
        for node in pids(program):
            wait_until(partial(holds_nothing, addresses(program)[node]), f"{node} holds nothing")
        children = program.note_footprint()
        program.signal(signal.SIGINT)
        assert program.wait_exit() == 0
        program.require_nothing_left(children)
    say("all right")
    return 0


def say(text: str) -> None:
    """A line, at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
