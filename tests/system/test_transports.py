"""Relays whose nodes have `--kv-transport X`, for every X: real processes, real client, tokens equal to those of
transformers. `baton serve` hands the flag on (tests/launch/test_serve.py).

A transport moves bytes of a `KvLayout` and knows no model, so the families are spread over transports and devices: each
family runs on both devices and over two transports, and two of them are quantized while they are loaded. transformers
has the numbers then that quantizing makes of the weights.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import openai
import psutil
import pytest

from baton.engine.models.quantization.while_loading import AUTO
from tests.engine.models.quantization.answers import dequantized
from tests.system.conftest import Checkpoints
from tests.system.harness import BLOCK_SIZE, MODEL_NAME, START_TIMEOUT_S, Relay, start_relay, wait_until
from tests.system.reference import LOGPROB_TOLERANCE, Expected, Reference, make_prompt

_LENGTHS = (1, BLOCK_SIZE - 1, BLOCK_SIZE, 2 * BLOCK_SIZE + 1, 5 * BLOCK_SIZE + 10)
_NUM_TOKENS, _NEW = 16, (3, 1, 4, 1)
_AGENT = "baton.kvtransfer.transports.nixl.agent"
_RANKS = ("--tensor-parallel-size", "2")
_RELAYS = (
    ("shm", "cpu", "llama", "int8", ()),
    ("shm", "emulated", "qwen2", "auto", ()),
    ("zmq", "cpu", "mistral", "int4", ()),
    ("zmq", "emulated", "llama", "auto", ()),
    ("nixl", "cpu", "qwen3", "auto", ()),
    ("nixl", "emulated", "mistral", "auto", _RANKS),
    ("nccl", "emulated", "qwen3", "auto", ()),
)
"""Transport, device, family, quantization, and the ranks of the prefill node. Ranks of decode nodes, and stages, are in
`shared_relay/test_ranks.py`."""
_FLAGS = ("--max-num-batched-tokens", "40")
_EAGER_ROUTER = (str(Path(__file__).with_name("eager_router.py")), "60")
_NUM_AGENTS, _NUM_DEATHS = 4, 2
"""Each node sends and receives. First all of them die, then one."""


def ask(client: openai.OpenAI, prompt: tuple[int, ...]) -> tuple[Expected, dict[str, float] | None]:
    """The greedy tokens after `prompt`, and what the usage says of the transfer."""
    answer = client.completions.create(
        model=MODEL_NAME,
        prompt=list(prompt),
        max_tokens=_NUM_TOKENS,
        temperature=0.0,
        logprobs=0,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    choice = answer.choices[0]
    assert choice.logprobs is not None
    token_ids = (choice.model_extra or {})["token_ids"]
    usage = answer.usage.model_extra if answer.usage is not None else None
    logprobs = [logprob or 0.0 for logprob in choice.logprobs.token_logprobs or ()]
    return Expected(tuple(token_ids), tuple(logprobs)), (usage or {}).get("kv_transfer")


def require_equal(answer: Expected, expected: Expected) -> None:
    """The same tokens exactly, log probabilities within the tolerance."""
    assert answer.token_ids == expected.token_ids
    assert answer.logprobs == pytest.approx(expected.logprobs, abs=LOGPROB_TOLERANCE)


@contextlib.contextmanager
def relaying(folder: Path, model: Path, *flags: str, prefill: Sequence[str] = ()) -> Iterator[Relay]:
    """A relay of two nodes with these flags, in which every prompt is handed over, and everything is pulled that can
    be. It ends well and leaves nothing."""
    both, router = (*flags, *_FLAGS), ("--local-prefill-tokens", "0")
    nodes = {"prefill": ((*both, *prefill),), "decode": (both,)}
    relay = start_relay(model, folder, **nodes, router=router, router_script=_EAGER_ROUTER)
    try:
        yield relay
        relay.stop()
    finally:
        relay.close()


def found_tokens(relay: Relay) -> int:
    """Tokens of prompts that the prefill node had cached."""
    return relay.prefills[0].metrics().value("prompt_tokens_by_source_total", source="local_cache_hit")


@pytest.mark.parametrize(("transport", "device", "family", "quantization", "prefill"), _RELAYS)
def test_a_relay_over_this_transport_answers_token_by_token_as_transformers_does(
    transport: str,
    device: str,
    family: str,
    quantization: str,
    prefill: Sequence[str],
    checkpoints: Checkpoints,
    references: Callable[[str], Reference],
    tmp_path: Path,
) -> None:
    folder = checkpoints(family)
    if quantization == AUTO:
        reference = references(family)
    else:
        reference = Reference(dequantized(folder, tmp_path / "dequantized", quantization))
    prompts = [make_prompt(length, 7) for length in _LENGTHS]
    flags = ("--kv-transport", transport, "--device", device, "--quantization", quantization)
    with relaying(tmp_path, folder, *flags, prefill=prefill) as relay:
        for prompt in prompts:
            answer, transfer = ask(relay.client, prompt)
            require_equal(answer, reference.greedy(prompt, _NUM_TOKENS, answer.token_ids))
            assert transfer is not None
            assert transfer["blocks"] == -(-len(prompt) // BLOCK_SIZE)
            assert transfer["exposed_ms"] > 0
            assert transfer["transfer_ms"] > 0
        # again, with others beside them: blocks that the decode node has cached do not travel a second time
        others = [make_prompt(length, seed) for length in _LENGTHS for seed in (8, 9)]
        with ThreadPoolExecutor(len(prompts) + len(others)) as threads:
            answers = list(threads.map(partial(ask, relay.client), [*prompts, *others]))
        for prompt, (answer, transfer) in zip([*prompts, *others], answers, strict=True):
            require_equal(answer, reference.greedy(prompt, _NUM_TOKENS, answer.token_ids))
            num_blocks = len(prompt) % BLOCK_SIZE > 0 if prompt in prompts else -(-len(prompt) // BLOCK_SIZE)
            assert (transfer or {"blocks": 0})["blocks"] == num_blocks
        # the next turn: the prefill node computes what is new behind the answer, once it has a copy of the rest
        turn = (*prompts[-1], *reference.greedy(prompts[-1], _NUM_TOKENS).token_ids, *_NEW)
        # unless its ranks have pools of their own
        num_pulled, num_found = BLOCK_SIZE * (not prefill), found_tokens(relay)
        answer, transfer = ask(relay.client, turn)
        require_equal(answer, reference.greedy(turn, _NUM_TOKENS, answer.token_ids))
        assert (transfer or {"blocks": 0})["blocks"] == 1
        assert relay.router.metrics().value("prefix_pull_tokens_total") == num_pulled
        assert found_tokens(relay) - num_found == len(prompts[-1]) // BLOCK_SIZE * BLOCK_SIZE + num_pulled
        relay.settle()


def agents_of(relay: Relay) -> list[psutil.Process]:
    """The agents that live."""
    found = []
    for node in relay.nodes:
        for child in psutil.Process(node.process.pid).children():
            with contextlib.suppress(psutil.ZombieProcess, psutil.NoSuchProcess):
                if _AGENT in child.cmdline():
                    found.append(child)
    return found


def test_nodes_survive_the_death_of_their_nixl_agents(
    checkpoints: Checkpoints, references: Callable[[str], Reference], tmp_path: Path
) -> None:
    reference = references("llama")
    with relaying(tmp_path, checkpoints("llama"), "--kv-transport", "nixl", "--device", "cpu") as relay:
        for seed in range(_NUM_DEATHS):
            prompt = make_prompt(50, 100 + seed)
            require_equal(ask(relay.client, prompt)[0], reference.greedy(prompt, _NUM_TOKENS))
            agents = agents_of(relay)
            assert len(agents) == _NUM_AGENTS
            for agent in agents[-1:] if seed else agents:
                os.kill(agent.pid, signal.SIGKILL)
            # at once: whatever the attempts of this request run into, its client sees the right tokens
            prompt = make_prompt(50, 200 + seed)
            require_equal(ask(relay.client, prompt)[0], reference.greedy(prompt, _NUM_TOKENS))
            wait_until(lambda: len(agents_of(relay)) == _NUM_AGENTS, "all agents are back", START_TIMEOUT_S)
            assert all(node.is_running for node in relay.nodes)

        numbers = itertools.count()

        def is_transferring() -> bool:
            return ask(relay.client, make_prompt(50, 1000 + next(numbers)))[1] is not None

        wait_until(is_transferring, "KV travels again", START_TIMEOUT_S)
