"""`python -m tests.system.pull_time`: what pulling a prefix takes, beside computing it and computing what is new alone.

Two prefill nodes with random weights take prompts in turns. Each round asks three times for one token: for a prompt
that nobody has seen ("compute"), for it with `NUM_NEW` tokens more at the other node, which pulls it ("pull"), and with
others at a node that has it ("rest"). Prints the median milliseconds of the client, and of the pull alone as the router
counts it.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from baton.wire.messages.membership import DECODE, PREFILL
from tests.checkpoints import make_checkpoint
from tests.engine.offload_time import SHAPES
from tests.system.harness import Relay, start_relay
from tests.system.parallel_grid import say
from tests.system.pull_trial import BOUND_S, EAGER_ROUTER
from tests.system.reference import make_prompt

NUM_NEW = 32


def ask_ms(relay: Relay, prompt: Sequence[int]) -> float:
    """Until the first token, which is the last."""
    begun_s = time.perf_counter()
    relay.ask(prompt, 1)
    took_ms = 1000 * (time.perf_counter() - begun_s)
    relay.settle()
    return took_ms


def pulling_s(relay: Relay) -> float:
    """What all pulls have taken."""
    body = relay.client.with_options(base_url=relay.router.address).get("/metrics", cast_to=str)
    lines = [line.split()[1] for line in body.splitlines() if line.startswith("baton:prefix_pull_seconds_total")]
    return float(lines[0])


def measure(relay: Relay, num_tokens: int, num_rounds: int) -> str:
    """A row of the table."""
    took: dict[str, list[float]] = defaultdict(list)
    for number in range(num_rounds):
        prompt = make_prompt(num_tokens, 1000 * num_tokens + number)
        took["compute"].append(ask_ms(relay, prompt))
        before_s = pulling_s(relay)
        took["pull"].append(ask_ms(relay, (*prompt, *make_prompt(NUM_NEW, number))))
        took["pull alone"].append(1000 * (pulling_s(relay) - before_s))
        took["rest"].append(ask_ms(relay, (*prompt, *make_prompt(NUM_NEW, number + 7))))
    return f"{num_tokens:6}" + "".join(f"  {what} {statistics.median(each):8.1f}" for what, each in took.items())


def main() -> None:
    """Measure what is named."""
    parser = argparse.ArgumentParser(prog="python -m tests.system.pull_time", description=__doc__)
    parser.add_argument("--shapes", default="small")
    parser.add_argument("--transports", default="shm,zmq")
    parser.add_argument("--num-tokens", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="baton-pulls-") as folder:
        family, fields = SHAPES[options.shapes]
        max_position = max(options.num_tokens) + 100
        model = make_checkpoint(
            Path(folder) / "model", family, max_position=max_position, dtype="bfloat16", changes=fields
        )
        for transport in options.transports.split(","):
            blocks = str(3 * max(options.num_tokens) // 16 + 20)
            flags = ("--kv-transport", transport, "--num-blocks", blocks)
            relay = start_relay(
                model,
                Path(folder),
                prefill=(flags, flags),
                decode=(flags,),
                router=("--local-prefill-tokens", "0", *(f"--{role}-policy=round_robin" for role in (PREFILL, DECODE))),
                router_script=(EAGER_ROUTER, str(BOUND_S)),
            )
            try:
                relay.ask(make_prompt(64, 1), 1)
                for num_tokens in options.num_tokens:
                    say(f"{transport} {measure(relay, num_tokens, options.rounds)}")
                relay.stop()
            finally:
                relay.close()


if __name__ == "__main__":
    main()
