"""Has Dynamo's own KV indexer follow a node, and asks it what it knows.

    python3 -m venv /tmp/dynamo && /tmp/dynamo/bin/pip install ai-dynamo-runtime==1.6.1
    python -m tests.node.kv_events.dynamo_indexer --python /tmp/dynamo/bin/python

Prompts fill a small pool several times over, a host tier and a folder. The indexer comes late, so it has to ask for a
replay. After each prompt it has to know how much of every prompt's beginning the pool has, how much of what follows the
host tier has, and of what follows that the folder, and nothing of a salted one. Takes half a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from baton.engine.cache.hashing import block_hashes
from baton.wire.prompt import Prompt
from tests.checkpoints import make_checkpoint
from tests.free_port import free_port
from tests.node.kv_events.small_node import BLOCK_SIZE, SmallNode

NUM_PROMPTS, NUM_TOKENS = 12, 45
WAIT_S = 20.0


class Indexer:
    """Dynamo's standalone indexer, a process with an HTTP port."""

    def __init__(self, python: str) -> None:
        port = free_port()
        self._address = f"http://127.0.0.1:{port}"
        command = [python, "-m", "dynamo.indexer", "--port", str(port), "--block-size", str(BLOCK_SIZE)]
        self._process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": ""})

    def ask(self, path: str, **body: Any) -> Any:
        """The answer to a POST."""
        data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(self._address + path, data, headers), timeout=5) as answer:
            return json.load(answer)

    def register(self, node: SmallNode) -> None:
        """Have it follow this node, as soon as it answers."""
        places = {"endpoint": node.publisher.endpoint, "replay_endpoint": node.publisher.replay_endpoint}
        deadline_s = time.monotonic() + WAIT_S
        while True:
            try:
                self.ask("/register", instance_id=1, model_name="m", block_size=BLOCK_SIZE, **places)
                return
            except OSError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.1)

    def num_known(self, token_ids: tuple[int, ...]) -> list[int]:
        """How many blocks of this prompt's beginning it believes to be in the pool, there or in the host tier behind
        that, and there or in the folder behind these."""
        found = self.ask("/query", model_name="m", token_ids=list(token_ids))["instances"].get("1", {})
        return [int(found.get(place, 0)) // BLOCK_SIZE for place in ("gpu", "cpu", "disk")]

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait(WAIT_S)


def num_held(node: SmallNode, prompt: Prompt) -> list[int]:
    """The same as it is."""
    if prompt.cache_salt:
        return [0, 0, 0]
    hashes = block_hashes(node.engine.fingerprint, prompt, (), BLOCK_SIZE)
    ends, end = [], 0
    for held in (node.hashes, *node.in_tiers(hashes)):
        while end < len(hashes) and int.from_bytes(hashes[end][-8:], "big") in held:
            end += 1
        ends.append(end)
    return ends


def compare(node: SmallNode, indexer: Indexer, prompts: list[Prompt]) -> list[list[int]]:
    """What the node has of each prompt, once the indexer says the same."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        node.core.take_cache_changes()
        expected = [num_held(node, prompt) for prompt in prompts]
        known = [indexer.num_known(prompt.token_ids) for prompt in prompts]
        if known == expected:
            return known
        assert time.monotonic() < deadline_s, f"the node has {expected}, and the indexer knows {known}"
        time.sleep(0.05)


def introduce(node: SmallNode, indexer: Indexer) -> None:
    """Publish until the indexer has heard of something: it takes ZMQ a moment to connect."""
    deadline_s = time.monotonic() + WAIT_S
    prompt = Prompt.of(range(NUM_TOKENS))
    while not any(indexer.num_known(prompt.token_ids)):
        assert time.monotonic() < deadline_s, "the indexer hears of nothing"
        prompt = Prompt.of([100 + node.num_requests, *range(1, NUM_TOKENS)])
        node.serve(prompt)
        time.sleep(0.1)


def main() -> None:
    """Compare after each prompt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="interpreter that has ai-dynamo-runtime")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "cache"
        cache.mkdir()
        node = SmallNode(make_checkpoint(Path(folder) / "model", "llama"), disk=cache)
        indexer = Indexer(arguments.python)
        try:
            prompts = []
            for number in range(NUM_PROMPTS):
                salt = b"tenant" if number % 4 == 3 else b""
                prompts.append(Prompt.of([number, *range(1, NUM_TOKENS)], salt))
                node.serve(prompts[-1])
                if number == 1:
                    indexer.register(node)
                    introduce(node, indexer)
                elif number > 1:
                    sys.stdout.write(f"prompt {number}: {compare(node, indexer, prompts)} blocks\n")
            sys.stdout.write(f"{node.publisher.replays}, {node.publisher.blocks}\n")
        finally:
            indexer.close()
            node.close()


if __name__ == "__main__":
    main()
