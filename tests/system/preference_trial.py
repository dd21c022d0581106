"""`python -m tests.system.preference_trial`: mixed nodes that are told all the time to prefer something else, requests
whose goals are drawn at random, and whether every token is right.

Starts `baton serve --mixed` with goals and a tiny checkpoint, sends greedy requests from several clients, changes what
a node prefers every few milliseconds, and compares the tokens with transformers'. A goal of 1 ms is late everywhere, so
whoever is done first gets the prompt; one of a minute leaves it with the node that prefers prompts. At the end no block
is held anywhere, and it says how many prompts went which way.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.checkpoints import make_checkpoint
from tests.system.reference import Reference, make_prompt
from tests.system.serve import serving

_LENGTHS = (3, 40, 200, 700)
_OUTPUTS = (1, 4, 40)
_GOALS_MS = (1, 20, 60_000, 60_000)
_WAYS = {"handed over": "handoff_attempts", "computed where they were generated": "decode_only_attempts"}


def main() -> None:
    """Run it; exits with 1 when a token is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.system.preference_trial", description=__doc__)
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kv-transport", default="auto")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="preference-") as name:
        model = make_checkpoint(Path(name) / "tiny", "llama", max_position=1024)
        reference = Reference(model)
        prompts = [make_prompt(chance.choice(_LENGTHS), number) for number in range(options.requests // 2)]
        asked = [
            (chance.choice(prompts), chance.choice(_OUTPUTS), chance.choice(_GOALS_MS)) for _ in range(options.requests)
        ]
        expected = [list(reference.greedy(prompt, count).token_ids) for prompt, count, _ in asked]
        flags = ("--mixed", "--prefill", "1", "--decode", "2", "--goal-ttft-ms", "20", "--goal-tpot-ms", "10")
        more = ("--dtype", "float32", "--kv-transport", options.kv_transport, "--min-goal-ttft-ms", "1")
        with serving(Path(name), str(model), *flags, *more) as serve:
            sys.stdout.write(_trial(serve.endpoint, asked, expected, chance))


def _trial(
    url: str, asked: list[tuple[tuple[int, ...], int, int]], expected: list[list[int]], chance: random.Random
) -> str:
    nodes = [node["id"] for node in _call(f"{url}/server_info")["nodes"]]
    is_over = threading.Event()

    def change() -> int:
        number = 0
        while not is_over.wait(0.005):
            role = chance.choice(("prefill", "decode", "both"))
            _call(f"{url}/admin/prefer", {"node": chance.choice(nodes), "role": role})
            number += 1
        return number

    def ask(prompt: tuple[int, ...], count: int, goal_ms: int) -> list[int]:
        body = {"model": _model(url), "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
        answer = _call(f"{url}/v1/completions", {**body, "return_token_ids": True, "goal_ttft_ms": goal_ms})
        found: list[int] = answer["choices"][0]["token_ids"]
        return found

    with ThreadPoolExecutor(9) as pool:
        changes = pool.submit(change)
        answers = list(pool.map(lambda each: ask(*each), asked))
        is_over.set()
    if answers != expected:
        sys.exit(f"{sum(map(list.__ne__, answers, expected))} of {len(asked)} answers are wrong")
    _wait_until_idle(url)
    ways = ", ".join(f"{_counter(url, name)} {way}" for way, name in _WAYS.items())
    return f"{len(asked)} answers are right, over {changes.result()} changes; {ways}\n"


def _counter(url: str, name: str) -> int:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return int(
        sum(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == f"baton:relay_{name}_total"
        )
    )


def _wait_until_idle(url: str) -> None:
    for _ in range(100):
        nodes = _call(f"{url}/server_info")["nodes"]
        if not any(node["load"] or node["num_held_blocks"] for node in nodes):
            return
        time.sleep(0.1)
    sys.exit("something is left on a node")


def _model(url: str) -> str:
    name: str = _call(f"{url}/v1/models")["data"][0]["id"]
    return name


def _call(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


if __name__ == "__main__":
    main()
