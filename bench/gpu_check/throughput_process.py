"""Offline generation: Baton's engine against transformers with a static cache, the same sizes, prompts and lengths.

Owns the work that both do: so many prompts of one length at once, each continued by as many tokens, greedily, whatever
the tokens are. Both have random weights of the same sizes. Compiling transformers' forward pass takes longer than
everything else here, so it gets a limit of its own.
"""

from __future__ import annotations

import dataclasses
import gc
import random
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch

from bench.gpu_check.parts_process import NoiseEngines, Setup, Unavailable, first_line
from bench.gpu_check.rows import Row, figure_row, least_row
from bench.gpu_check.shapes import config_of
from bench.gpu_check.steps_process import GREEDY
from engine.build import Engine
from wire.request_key import RequestKey

_COMPILE_S = 35.0
_COMPILED = "0.6B compiled"


@dataclass(frozen=True, slots=True)
class Work:
    """`batch` prompts of `num_prompt` tokens, each continued by `num_output` tokens."""

    batch: int
    num_prompt: int
    num_output: int

    def __str__(self) -> str:
        return f"{self.batch} x {self.num_prompt} + {self.num_output} tokens"


class ThroughputBench:
    """See `Bench`. Checks are named after models."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._engines = NoiseEngines(setup)
        self._device = "cuda" if setup.is_gpu else "cpu"
        self._work = Work(32, 256, 64) if setup.is_gpu else Work(2, 16, 6)
        self._baton_tok_per_s = 0.0

    def check(self, name: str) -> list[Row]:
        """See `Bench.check`."""
        if name == _COMPILED:
            return self._compiled()
        ours = self._baton_tok_per_s = self._baton(name)
        self._release()
        theirs = self._transformers(name, compile_it=False)
        self._release()
        case = f"{self._setup.label(name)}, {self._work}"
        return [
            figure_row("offline, Baton", case, ours, "tok/s"),
            figure_row("offline, transformers, static cache", case, theirs, "tok/s"),
            least_row("Baton over transformers", case, ours / theirs, "times", 1.0),
        ]

    def close(self) -> None:
        """See `Bench.close`."""
        self._engines.close()

    def _baton(self, name: str) -> float:
        work = self._work
        num_tokens = work.num_prompt + work.num_output + 16
        engine = self._engines.build(
            self._setup.model(name),
            max_model_len=num_tokens,
            num_blocks=2 + work.batch * -(-num_tokens // 16),
            max_num_seqs=work.batch,
            enable_prefix_caching=False,
        )
        return max(generated_tok_per_s(engine, work, seed) for seed in range(3))

    def _transformers(self, name: str, *, compile_it: bool) -> float:
        from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

        fields = config_of(self._setup.model(name))
        config = AutoConfig.for_model(**fields)
        with torch.device(self._device):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        work = self._work
        options: dict[str, Any] = {} if compile_it else {"disable_compile": True}
        generation = GenerationConfig(
            do_sample=False,
            max_new_tokens=work.num_output,
            min_new_tokens=work.num_output,
            cache_implementation="static",
            pad_token_id=0,
            **options,
        )
        ids = torch.randint(0, fields["vocab_size"] - 8, (work.batch, work.num_prompt), device=self._device)
        best = 0.0
        for _ in range(3):
            begin_s = time.perf_counter()
            with torch.inference_mode():
                found = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=generation)
            num_tokens = found[:, work.num_prompt :].tolist()  # waits for the device
            best = max(best, sum(map(len, num_tokens)) / (time.perf_counter() - begin_s))
        return best

    def _compiled(self) -> list[Row]:
        """Raises `Unavailable` when it does not compile in time: this process is then not used any more."""
        if not self._setup.is_gpu:
            raise Unavailable("transformers compiles with a static cache on a GPU only")
        told: list[float | str] = []

        def measure() -> None:
            try:
                told.append(self._transformers("0.6B", compile_it=True))
            except Exception as error:  # whatever a compiler raises is the answer
                told.append(first_line(error))

        thread = threading.Thread(target=measure, daemon=True)
        thread.start()
        thread.join(_COMPILE_S)
        if not told or isinstance(told[0], str):
            raise Unavailable(told[0] if told and isinstance(told[0], str) else f"not compiled within {_COMPILE_S:g} s")
        case = f"0.6B, {self._work}"
        rows = [figure_row("offline, transformers, static cache, compiled", case, told[0], "tok/s")]
        if self._baton_tok_per_s:
            ratio = self._baton_tok_per_s / told[0]
            rows.append(least_row("Baton over compiled transformers", case, ratio, "times", 1.0))
        return rows

    def _release(self) -> None:
        """Memory of what is not used any more."""
        if self._setup.is_gpu:
            gc.collect()
            torch.cuda.empty_cache()


def generated_tok_per_s(engine: Engine, work: Work, seed: int) -> float:
    """Generated tokens over the whole time, prompts included."""
    core, chance = engine.core, random.Random(seed)
    params = dataclasses.replace(GREEDY, max_tokens=work.num_output)
    num_generated = 0
    begin_s = time.perf_counter()
    for number in range(work.batch):
        prompt = chance.choices(range(engine.config.vocab_size), k=work.num_prompt)
        core.add(RequestKey.numbered(number), prompt, params)
    while core.has_work:
        num_generated += sum(output.token is not None for output in core.step())
    return num_generated / (time.perf_counter() - begin_s)


def open_bench(setup: Setup) -> ThroughputBench:
    """See `bench.gpu_check.worker_process`."""
    return ThroughputBench(setup)
