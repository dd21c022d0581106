"""`python -m tests.system.pull_trial`: prefixes are pulled between real processes, while one of them dies or freezes.

A conversation of two turns at a time: the KV of the first answer lies at its decode node, so the router copies it to
the node that is to compute the second turn (`eager_router.py`: whether it is worth it does not count). At first
undisturbed over each transport and between the nodes that can, and with KV of other kinds; then with a holder that
pushes a block each `PUSH_S`, of which the holder or the taker gets SIGKILL or SIGSTOP in the middle. Every turn has the
tokens of transformers and ends in time, what had come of the prefix is used, and at the end every block of every node
that lives is free or cached. Writes a line for each.
"""

from __future__ import annotations

import argparse
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from baton import LLM, SamplingParams
from tests.checkpoints import make_checkpoint, write_tokenizer
from tests.engine.models.families import COMMON, make_model
from tests.system.harness import Node, Relay, start_relay, wait_until
from tests.system.parallel_grid import say
from tests.system.reference import Reference, make_prompt

EAGER_ROUTER, SLOW_DECODE = (str(Path(__file__).with_name(f"{name}.py")) for name in ("eager_router", "slow_decode"))
PUSH_S = 0.15
BOUND_S = 30.0
"""How long the router waits for a pull: longer than the router needs to see that a node is dead."""
LATE_S = 20.0
"""What a turn may take with a fault, on a busy machine."""
NUM_HISTORY, NUM_ANSWER, NUM_NEW, NUM_TOKENS = 70, 300, 20, 24
RESULTS = ("arrived", "refused", "failed", "late", "cancelled")
NODE = ("--lease-s", "3")
KINDS = ("qwen3-next", "lfm2", "deepseek-v3", "gemma3", "gpt-oss")
"""States of two kinds, latents, windows, sinks."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A relay, and what its answers should be."""

    relay: Relay
    reference: Reference

    def first_turn(self, seed: int) -> tuple[int, ...]:
        """The prompt of the second turn, after the first."""
        prompt = make_prompt(NUM_HISTORY, seed)
        answer = self.relay.ask(prompt, NUM_ANSWER).token_ids
        assert answer == self.reference.greedy(prompt, NUM_ANSWER, answer).token_ids
        self.relay.settle()
        return (*prompt, *answer, *make_prompt(NUM_NEW, seed))

    def require(self, prompt: tuple[int, ...], answer: tuple[int, ...]) -> None:
        """The answer is the right one."""
        assert answer == self.reference.greedy(prompt, NUM_TOKENS, answer).token_ids, "other tokens"

    def results(self) -> dict[str, int]:
        """How pulls have ended."""
        metrics = self.relay.router.metrics()
        counts = {result: metrics.value("prefix_pulls_total", result=result) for result in RESULTS}
        return {result: count for result, count in counts.items() if count}


@contextmanager
def trial(
    model: Path, prefill: Sequence[Sequence[str]], decode: Sequence[Sequence[str]], bound_s: float = BOUND_S
) -> Iterator[Trial]:
    """A relay of these nodes, with a router that pulls whatever it can."""
    with tempfile.TemporaryDirectory(prefix="baton-pulls-") as folder:
        relay = start_relay(
            model,
            Path(folder),
            prefill=prefill,
            decode=decode,
            router=("--local-prefill-tokens", "0", "--decode-policy", "round_robin", "--prefill-policy", "round_robin"),
            router_script=(EAGER_ROUTER, str(bound_s)),
        )
        try:
            yield Trial(relay, Reference(model))
            relay.stop()
        finally:
            relay.close()


def undisturbed(model: Path, transport: str) -> None:
    """From the decode node to the prefill node."""
    flags = (*NODE, "--kv-transport", transport)
    with trial(model, (flags,), (flags,)) as trying:
        for seed in range(5):
            prompt = trying.first_turn(seed)
            trying.require(prompt, trying.relay.ask(prompt, NUM_TOKENS).token_ids)
            trying.relay.settle()
        metrics = trying.relay.router.metrics()
        took = metrics.value("prefix_pull_tokens_total")
        assert trying.results() == {"arrived": 5}, trying.results()
        say(f"{transport}: decode to prefill: {trying.results()}, {took} tokens")


def of_mixed(model: Path, transport: str) -> None:
    """Between nodes that do any leg."""
    flags = (*NODE, "--kv-transport", transport)
    with trial(model, (), ()) as trying:
        relay = trying.relay
        script = ("-m", "baton.node")
        relay.join(*(relay.launch("decode", "--role", role, *flags, script=script) for role in ("both", "both")))
        for seed in range(5):
            prompt = trying.first_turn(seed)
            trying.require(prompt, relay.ask(prompt, NUM_TOKENS).token_ids)
            relay.settle()
        assert trying.results()["arrived"] > 0, trying.results()
        say(f"{transport}: between mixed nodes: {trying.results()}")


def of_kind(folder: Path, family: str, flags: Sequence[str], **settings: Any) -> None:
    """KV of another kind: the tokens are those of one engine that computes all."""
    make_model(folder, family, {**COMMON, "max_position_embeddings": 1024, "vocab_size": 320})
    write_tokenizer(folder, 320, 1024)
    all_flags = (*NODE, "--kv-transport", "shm", *flags)
    engine = LLM(str(folder), num_blocks=64, num_threads=1, **settings)
    with trial(folder, (all_flags,), (all_flags,)) as trying:
        for seed in range(3):
            prompt = make_prompt(NUM_HISTORY, seed)
            for num_tokens in (NUM_ANSWER, NUM_TOKENS):
                params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
                answer = trying.relay.ask(prompt, num_tokens).token_ids
                assert answer == tuple(engine.generate([list(prompt)], params)[0].token_ids), "other tokens"
                trying.relay.settle()
                prompt = (*prompt, *answer, *make_prompt(NUM_NEW, seed))
        assert trying.results() == {"arrived": 3}, trying.results()
        say(f"{family}, {' '.join(flags) or 'auto'}: {trying.results()}")


def with_fault(model: Path, transport: str, role: str, number: signal.Signals, bound_s: float) -> None:
    """The holder ("decode") or the taker ("prefill") gets a signal when some blocks have been pushed."""
    flags = (*NODE, "--kv-transport", transport)
    with trial(model, (flags, flags), (flags,), bound_s) as trying:
        relay = trying.relay
        holder = relay.add("decode", *flags, script=(SLOW_DECODE, "9999", "9999", str(PUSH_S)))
        relay.drop(relay.decodes[0])
        prompt = trying.first_turn(number)
        relay.add("decode", *flags)  # somebody goes on when the holder is gone
        began_s = time.monotonic()
        with relay.open_soon(prompt, NUM_TOKENS) as answer:
            wait_until(lambda: bool(takers(relay)), "a prefill node takes a prefix")
            victim = holder if role == "decode" else takers(relay)[0]
            time.sleep(2 * PUSH_S)
            victim.signal(number)
            if number == signal.SIGKILL:
                victim.kill()
                relay.nodes.remove(victim)
            tokens = answer.result(60).token_ids
        took_s = time.monotonic() - began_s
        trying.require(prompt, tokens)
        assert took_s < LATE_S, f"{took_s:.1f} s"
        results, num_found = trying.results(), found(relay)
        if number == signal.SIGSTOP:
            victim.signal(signal.SIGCONT)
            relay.wait_for_members()
        relay.settle()
        trying.require(prompt, relay.ask(prompt, NUM_TOKENS).token_ids)
        relay.settle()
        what = f"{transport}: {number.name} of the {role} node"
        assert num_found > 0 or role == "prefill", "what came before was not used"
        say(f"{what}: {results}, {num_found} tokens used, answered in {took_s:.1f} s, then {trying.results()}")


def found(relay: Relay) -> int:
    """Tokens of prompts that prefill nodes have found in their caches."""
    return sum(
        node.metrics().value("prompt_tokens_by_source_total", source="local_cache_hit") for node in running(relay)
    )


def running(relay: Relay) -> list[Node]:
    """The prefill nodes that can be asked."""
    return [node for node in relay.prefills if psutil.Process(node.process.pid).status() != psutil.STATUS_STOPPED]


def takers(relay: Relay) -> list[Node]:
    """The prefill nodes that have reserved blocks: all prompts before are over."""
    return [node for node in relay.prefills if node.metrics().value("kv_blocks", state="held")]


def main() -> None:
    """Run all, or what is named."""
    parser = argparse.ArgumentParser(prog="python -m tests.system.pull_trial", description=__doc__)
    parser.add_argument("--only", choices=("undisturbed", "mixed", "kinds", "faults"))
    parser.add_argument("--transports", default="shm,zmq,nixl")
    options = parser.parse_args()
    transports = options.transports.split(",")
    with tempfile.TemporaryDirectory(prefix="baton-pulls-") as folder:
        model = make_checkpoint(Path(folder) / "tiny", "llama", max_position=1024)
        for transport in transports:
            if options.only in (None, "undisturbed"):
                undisturbed(model, transport)
            if options.only in (None, "mixed"):
                of_mixed(model, transport)
        for family in KINDS if options.only in (None, "kinds") else ():
            of_kind(Path(folder) / family, family, ())
        if options.only in (None, "kinds"):
            of_kind(Path(folder) / "fp8", "llama", ("--kv-cache-dtype", "fp8"), kv_cache_dtype="fp8")
        for transport in transports if options.only in (None, "faults") else ():
            for role in ("decode", "prefill"):
                with_fault(model, transport, role, signal.SIGKILL, BOUND_S)
                with_fault(model, transport, role, signal.SIGSTOP, 1.0)


if __name__ == "__main__":
    main()
