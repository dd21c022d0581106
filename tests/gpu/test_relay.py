"""A prefill and a decode node on one device: token by token what transformers gives, over each transport.

Every prompt goes through a handoff, once alone and once with all others at the same time; greedy tokens in float32
must be those of transformers. In bfloat16 no two programs agree to the end, so there the question is how far Baton
stays with float32, and how far transformers does in bfloat16.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from baton.bench.gpu_check.command import TRANSPORTS
from baton.bench.gpu_check.relay_process import why_not
from baton.device.base import Device
from tests.checkpoints import make_checkpoint
from tests.gpu.conftest import DEVICE, IS_GPU, IS_QUICK
from tests.system.harness import REQUEST_TIMEOUT_S, START_TIMEOUT_S, wait_until
from tests.system.reference import Expected, Reference, make_prompt
from tests.system.serve import Serve

FAMILIES = {"auto": "qwen3", "shm": "llama", "zmq": "qwen3", "nixl": "llama", "nccl": "qwen3", "bfloat16": "qwen3"}
FAMILIES |= {"ranks": "qwen3"}
RANKS = ("ranks",) if IS_GPU and torch.cuda.device_count() > 1 else ()
RELAYS = ("auto", "nixl", "bfloat16") if IS_QUICK else ("auto", *TRANSPORTS, "bfloat16", *RANKS)
TOLD = {
    "bfloat16": ("--dtype", "bfloat16", "--kv-transport", "auto"),
    "ranks": (
        *("--dtype", "float32", "--kv-transport", "nixl"),
        *("--prefill-pipeline-parallel-size", "2", "--decode-tensor-parallel-size", "2"),
    ),
}
"""Two stages on two GPUs hand over to two ranks on the same ones."""
LENGTHS = (1, 15, 16, 17, 33, 90, 200)
NUM_TOKENS = 20
LOGPROB_BOUND = 2e-3
WORSE_THAN_TRANSFORMERS, SLACK = 3.0, 0.02
FLAGS = ["--served-model-name", "tiny", "--local-prefill-tokens", "0", "--num-blocks", "256", "--max-num-seqs", "16"]
FLAGS += ["--prefill", "1", "--max-num-batched-tokens", "64", "--device", DEVICE]
SHARE = ("--gpu-memory-utilization", "0.12") if IS_GPU else ()
"""A small part of the GPU: all relays run on it together."""


class Relays:
    """`baton serve` for each of `RELAYS`. On a GPU all start at the same time, as starting takes longer than asking."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[str, Serve] = {}

    def start(self, name: str) -> None:
        """Without waiting for it."""
        folder = self._folder / name
        folder.mkdir()
        told = TOLD.get(name, ("--dtype", "float32", "--kv-transport", name))
        self._running[name] = Serve(folder, str(self.checkpoint(name)), *FLAGS, *told, *SHARE)

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[openai.OpenAI]:
        """A client of a relay, which ends with the block."""
        if name not in self._running:
            self.start(name)
        serve = self._running.pop(name)
        try:
            wait_until(lambda: bool(serve.endpoint) or not serve.is_running, "serve announced itself", START_TIMEOUT_S)
            assert serve.is_running, serve.err[-4000:]
            with openai.OpenAI(
                base_url=f"{serve.endpoint}/v1", api_key="none", max_retries=0, timeout=REQUEST_TIMEOUT_S
            ) as client:
                yield client
        finally:
            serve.kill()

    def checkpoint(self, name: str) -> Path:
        """Of the family of a relay."""
        folder = self._folder / "checkpoints" / FAMILIES[name]
        return folder if folder.exists() else make_checkpoint(folder, FAMILIES[name], changes={"head_dim": 64})

    def close(self) -> None:
        """End those that nobody asked."""
        for serve in self._running.values():
            serve.kill()


@pytest.fixture(scope="module")
def relays(device: Device, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Relays]:
    found = Relays(tmp_path_factory.mktemp("relays"))
    try:
        for name in RELAYS if IS_GPU else ():
            if not why_not(name, DEVICE):
                found.start(name)
        yield found
    finally:
        found.close()


def ask(client: openai.OpenAI, prompt: Sequence[int], num_tokens: int) -> tuple[Expected, dict[str, Any]]:
    """The greedy continuation, and what the usage says of the handoff."""
    answer = client.completions.create(
        model="tiny",
        prompt=list(prompt),
        max_tokens=num_tokens,
        temperature=0.0,
        logprobs=0,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    choice = answer.choices[0]
    assert choice.model_extra is not None
    assert choice.logprobs is not None
    assert answer.usage is not None
    token_ids, logprobs = choice.model_extra["token_ids"], choice.logprobs.token_logprobs or ()
    return Expected(tuple(token_ids), tuple(map(float, logprobs))), (answer.usage.model_extra or {})["kv_transfer"]


@pytest.mark.parametrize("transport", [name for name in RELAYS if name != "bfloat16"])
def test_a_relay_answers_as_transformers_does(
    transport: str, relays: Relays, device: Device, within: Callable[..., None]
) -> None:
    if reason := why_not(transport, DEVICE):
        pytest.skip(reason)
    alone, together = ([make_prompt(length, seed) for length in LENGTHS] for seed in (7, 8))
    reference = Reference(relays.checkpoint(transport))
    with relays.open(transport) as client, ThreadPoolExecutor(len(LENGTHS)) as threads:
        answers = [ask(client, prompt, NUM_TOKENS) for prompt in alone]
        answers += threads.map(partial(ask, client, num_tokens=NUM_TOKENS), together)
    differences = []
    for prompt, (found, transfer) in zip([*alone, *together], answers, strict=True):
        wanted = reference.greedy(prompt, NUM_TOKENS)
        assert found.token_ids == wanted.token_ids
        assert transfer["blocks"] > 0, "a prompt without a handoff"
        differences += [abs(a - b) for a, b in zip(found.logprobs, wanted.logprobs, strict=True)]
    within(float(torch.tensor(differences).max()), LOGPROB_BOUND, note="logprobs", num_cases=len(answers))


def divergence(found: Sequence[Expected], exact: Sequence[Expected]) -> tuple[float, float]:
    """The mean share of tokens before the first that differs, and the mean difference of the logprobs up to there."""
    shares, differences = [], []
    for mine, theirs in zip(found, exact, strict=True):
        pairs = zip(mine.token_ids, theirs.token_ids, strict=True)
        count = next((place for place, (a, b) in enumerate(pairs) if a != b), len(theirs.token_ids))
        shares.append(count / len(theirs.token_ids))
        differences += [abs(a - b) for a, b in zip(mine.logprobs[:count], theirs.logprobs[:count], strict=True)]
    return sum(shares) / len(shares), float(torch.tensor(differences).mean())


def test_bfloat16_stays_as_near_to_float32_as_in_transformers(
    relays: Relays, device: Device, within: Callable[..., None]
) -> None:
    num_prompts, num_tokens = (6, 64) if IS_GPU else (2, 12)
    prompts = [make_prompt(40 + 23 * index, 9) for index in range(num_prompts)]
    with relays.open("bfloat16") as client:
        ours = [ask(client, prompt, num_tokens)[0] for prompt in prompts]
    folder = relays.checkpoint("bfloat16")
    exact = [Reference(folder).greedy(prompt, num_tokens) for prompt in prompts]
    in_bfloat16 = Reference(folder, torch.bfloat16)
    theirs = [in_bfloat16.greedy(prompt, num_tokens) for prompt in prompts]
    (our_share, our_difference), (their_share, their_difference) = divergence(ours, exact), divergence(theirs, exact)
    note = f"logprobs; tokens before the two part: {our_share:.0%}, transformers' {their_share:.0%}"
    within(our_difference, WORSE_THAN_TRANSFORMERS * their_difference + SLACK, unit="mean", note=note)
