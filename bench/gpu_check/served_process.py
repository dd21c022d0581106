"""Checks of a whole relay on one device: a prefill and a decode node under `baton serve`, against transformers.

Owns the relays and the prompts. Every prompt goes through a handoff, once alone and once with all others at the same
time; greedy tokens in float32 must be those of transformers. In bfloat16 no two programs agree to the end, so there the
question is how far Baton stays with float32, and how far transformers does in bfloat16.
"""

from __future__ import annotations

import contextlib
import json
import random
import tempfile
import urllib.request
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.gpu_check.checkpoints import VOCAB_SIZE, write_checkpoint
from bench.gpu_check.floors import prefix_share
from bench.gpu_check.parts_process import Setup, Unavailable, require_transport
from bench.gpu_check.plan import TRANSPORTS
from bench.gpu_check.rows import Row, count_row, error_row, figure_row, worst_of
from bench.limits.served import baton_target
from bench.targets.process import RunningTarget
from wire.errors import RequestFailed

_READY_S = 60.0
_REQUEST_S = 30.0
_PATIENCE_S = 8.0
_FAMILIES = {"auto": "qwen3", "shm": "llama", "zmq": "qwen3", "nixl": "llama", "nccl": "qwen3"}
_LENGTHS = (1, 15, 16, 17, 33, 90, 200)
_NUM_TOKENS = 20
_LOGPROB_BOUND = 2e-3
_DIVERGENCE_PROMPTS, _DIVERGENCE_TOKENS = 6, 64
_WORSE_THAN_TRANSFORMERS = 3.0
_SLACK = 0.02
_FLAGS = ("--max-model-len", "512", "--num-blocks", "256", "--max-num-seqs", "16", "--max-num-batched-tokens", "64")


@dataclass(frozen=True, slots=True)
class Greedy:
    """Greedy tokens of one prompt, and the natural logarithm of each one's probability."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


def make_prompts(lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Random ids; no two prompts share a beginning."""
    chance = random.Random(seed)
    return [chance.choices(range(VOCAB_SIZE - 8), k=length) for length in lengths]


class Reference:
    """A checkpoint in transformers."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device | str) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(device)
        self._device = device

    @torch.inference_mode()
    def greedy(self, prompt: Sequence[int], num_tokens: int) -> Greedy:
        """As if there were no end-of-sequence token."""
        from transformers import GenerationConfig

        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=num_tokens,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        self._model.generation_config = config
        ids = torch.tensor([list(prompt)], device=self._device)
        output = self._model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)
        token_ids = output.sequences[0, len(prompt) :].tolist()
        logprobs = torch.log_softmax(torch.cat(output.logits).float(), dim=-1)
        return Greedy(tuple(token_ids), tuple(logprobs[range(len(token_ids)), token_ids].tolist()))


class Relay:
    """A running `baton serve` with one prefill and one decode node. Context manager."""

    def __init__(self, folder: Path, device: str, *flags: str, ready_s: float = _READY_S) -> None:
        target = baton_target("relay", str(folder), "--device", device, "--local-prefill-tokens", "0", *flags)
        self._running = RunningTarget(target, ready_s, lambda _: None, _PATIENCE_S)
        self._model = str(folder)

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        """Where it answers."""
        return self._running.url

    def close(self) -> None:
        """End it."""
        self._running.close()

    def ask(self, prompt: Sequence[int], num_tokens: int) -> tuple[Greedy, dict[str, Any] | None]:
        """The greedy continuation, and what the usage says of the handoff. Raises `RequestFailed`."""
        body = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": num_tokens,
            "temperature": 0.0,
            "logprobs": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=_REQUEST_S) as answer:
                found = json.loads(answer.read())
        except OSError as error:
            raise RequestFailed(f"a request failed: {error}") from None
        choice = found["choices"][0]
        greedy = Greedy(tuple(choice["token_ids"]), tuple(choice["logprobs"]["token_logprobs"]))
        return greedy, found["usage"].get("kv_transfer")


class ServedBench:
    """See `Bench`. Checks are named after transports. On a GPU all relays start at the same time, `in_parallel`."""

    def __init__(self, setup: Setup, *, in_parallel: bool = True) -> None:
        self._setup = setup
        self._in_parallel = in_parallel and setup.is_gpu
        self._folder = tempfile.TemporaryDirectory(prefix="baton-gpu-check-")
        self._threads = ThreadPoolExecutor(len(TRANSPORTS) if self._in_parallel else 1)
        self._relays: dict[str, Future[Relay]] = {}
        self._references: dict[str, Reference] = {}

    def check(self, name: str) -> list[Row]:
        """See `Bench.check`."""
        if name == "divergence":
            return self._divergence()
        require_transport(name, self._setup)
        if self._in_parallel and not self._references:
            self._start_all()
        return self._tokens(name)

    def close(self) -> None:
        """See `Bench.close`."""
        for started in self._relays.values():
            if not started.cancel() and started.exception() is None:
                started.result().close()
        self._threads.shutdown()
        self._folder.cleanup()

    def _tokens(self, transport: str) -> list[Row]:
        started = self._relays.pop(transport, None)
        with self._start(transport) if started is None else started.result(_READY_S) as relay:
            family = _FAMILIES[transport]
            prompts = make_prompts(_LENGTHS, seed=7)
            wanted = [self._reference(family).greedy(prompt, _NUM_TOKENS) for prompt in prompts]
            alone = [relay.ask(prompt, _NUM_TOKENS) for prompt in prompts]
            with ThreadPoolExecutor(len(prompts)) as threads:
                together = list(threads.map(partial(relay.ask, num_tokens=_NUM_TOKENS), make_prompts(_LENGTHS, 8)))
            wanted += [self._reference(family).greedy(prompt, _NUM_TOKENS) for prompt in make_prompts(_LENGTHS, 8)]
        answers = [*alone, *together]
        num_wrong = sum(mine.token_ids != theirs.token_ids for (mine, _), theirs in zip(answers, wanted, strict=True))
        num_moved = sum(transfer is not None and transfer["blocks"] > 0 for _, transfer in answers)
        difference = worst_of(
            abs(a - b)
            for (mine, _), theirs in zip(answers, wanted, strict=True)
            if mine.token_ids == theirs.token_ids
            for a, b in zip(mine.logprobs, theirs.logprobs, strict=True)
        )
        case = f"{transport}, {family}, float32"
        return [
            count_row("tokens against transformers", case, num_wrong, len(answers)),
            count_row("prompts without a handoff", case, len(answers) - num_moved, len(answers)),
            error_row("logprobs against transformers", case, difference, _LOGPROB_BOUND),
        ]

    def _divergence(self) -> list[Row]:
        """How far bfloat16 stays with float32: Baton's and transformers'."""
        family = "qwen3"
        folder, device = self._checkpoint(family), "cuda" if self._setup.is_gpu else "cpu"
        num_prompts = _DIVERGENCE_PROMPTS if self._setup.is_gpu else 2
        num_tokens = _DIVERGENCE_TOKENS if self._setup.is_gpu else 12
        prompts = make_prompts([40 + 23 * index for index in range(num_prompts)], seed=9)
        exact = [self._reference(family).greedy(prompt, num_tokens) for prompt in prompts]
        with Relay(folder, device, *_FLAGS, "--dtype", "bfloat16", *self._share()) as relay:
            ours = [relay.ask(prompt, num_tokens)[0] for prompt in prompts]
        theirs_in = Reference(folder, torch.bfloat16, device)
        theirs = [theirs_in.greedy(prompt, num_tokens) for prompt in prompts]
        case = f"{num_prompts} prompts, {num_tokens} tokens"
        mine, other = divergence(ours, exact), divergence(theirs, exact)
        bound = _WORSE_THAN_TRANSFORMERS * other.mean_difference + _SLACK
        return [
            figure_row("tokens before bfloat16 parts from float32", f"Baton, {case}", mine.same_share, "share"),
            figure_row("tokens before bfloat16 parts from float32", f"transformers, {case}", other.same_share, "share"),
            error_row("logprobs, bfloat16 against float32", f"Baton, {case}", mine.mean_difference, bound, "mean"),
            figure_row("logprobs, bfloat16 against float32", f"transformers, {case}", other.mean_difference, "mean"),
        ]

    def _start_all(self) -> None:
        """Starting takes longer than asking. Checkpoints are written before, not by several threads."""
        for family in set(_FAMILIES.values()):
            self._checkpoint(family)
        for transport in TRANSPORTS:
            with contextlib.suppress(Unavailable):
                require_transport(transport, self._setup)
                self._relays[transport] = self._threads.submit(self._start, transport)

    def _start(self, transport: str) -> Relay:
        folder = self._checkpoint(_FAMILIES[transport])
        device = "cuda" if self._setup.is_gpu else "cpu"
        return Relay(folder, device, *_FLAGS, "--kv-transport", transport, "--dtype", "float32", *self._share())

    def _share(self) -> tuple[str, ...]:
        """A small part of the GPU: several relays run on it together."""
        return ("--gpu-memory-utilization", "0.12") if self._setup.is_gpu else ()

    def _checkpoint(self, family: str) -> Path:
        folder = Path(self._folder.name) / family
        return folder if folder.exists() else write_checkpoint(folder, family)

    def _reference(self, family: str) -> Reference:
        if family not in self._references:
            self._references[family] = Reference(self._checkpoint(family), torch.float32, "cpu")
        return self._references[family]


@dataclass(frozen=True, slots=True)
class Divergence:
    """The mean share of tokens before the first that differs, and the mean difference of the logprobs up to there."""

    same_share: float
    mean_difference: float


def divergence(found: Sequence[Greedy], exact: Sequence[Greedy]) -> Divergence:
    """Of continuations of the same prompts."""
    shares, differences = [], []
    for mine, theirs in zip(found, exact, strict=True):
        share = prefix_share(mine.token_ids, theirs.token_ids)
        count = round(share * len(theirs.token_ids))
        shares.append(share)
        differences += [abs(a - b) for a, b in zip(mine.logprobs[:count], theirs.logprobs[:count], strict=True)]
    mean = sum(differences) / len(differences) if differences else float("nan")
    return Divergence(sum(shares) / len(shares), mean)


def open_bench(setup: Setup) -> ServedBench:
    """See `bench.gpu_check.worker_process`."""
    return ServedBench(setup)
