"""llama.cpp's prompts and decode steps for `baton.bench.limits.step_turns`, with a Python that has `llama_cpp` and
numpy:

    python bench/limits/llama_cpp_steps_process.py MODEL.gguf

`llama-cpp-python` is built on the machine (`CMAKE_ARGS=-DGGML_NATIVE=ON pip install llama-cpp-python`). A step's
sequences have each computed their context: no KV is shared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

import llama_cpp
import numpy as np

_NUM_PROMPTS, _NUM_STEPS = 3, 24
_SILENT = llama_cpp.llama_log_callback(lambda *_: None)
"""What takes llama.cpp's log, some thousand lines of how it reads a file. The library keeps only its address."""
_SPARE_TOKENS = 64


class Steps:
    """One model, with room for `num_sequences` sequences of `num_tokens` tokens in all."""

    def __init__(self, path: str, num_threads: int, num_sequences: int, num_tokens: int) -> None:
        llama_cpp.llama_log_set(_SILENT, None)
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx, settings.n_seq_max, settings.kv_unified = num_tokens, num_sequences, True
        settings.n_batch, settings.n_ubatch = max(2048, num_sequences), 512
        settings.n_threads = settings.n_threads_batch = num_threads
        self._context: Any = llama_cpp.llama_init_from_model(model, settings)
        self._chance = np.random.default_rng(0)
        self._num_tokens = 0

    def begin(self) -> None:
        """Forget all sequences."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        self._num_tokens = 0

    def prompt_s(self, sequence: int, count: int) -> float:
        """Seconds in which a sequence computes its first `count` tokens, and the logits of the last."""
        first, total_s = 0, 0.0
        while first < count:
            last = min(first + 2048, count)
            total_s += self._compute([sequence] * (last - first), range(first, last), last == count)
            first = last
        self._num_tokens = count
        return total_s

    def step_s(self, batch: int) -> float:
        """Seconds of a step with one token of each sequence."""
        taken_s = self._compute(range(batch), [self._num_tokens] * batch, wants_all=True)
        self._num_tokens += 1
        return taken_s

    def _compute(self, sequences: Any, positions: Any, wants_all: bool) -> float:
        count = len(sequences)
        batch = llama_cpp.llama_batch_init(count, 0, 1)
        batch.n_tokens = count
        token_ids = self._chance.integers(10, 7000, count).tolist()
        is_prompt = len(set(sequences)) == 1 and count > 1
        for i, (token_id, position, sequence) in enumerate(zip(token_ids, positions, sequences, strict=True)):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token_id, position, 1, sequence
            batch.logits[i] = wants_all and (not is_prompt or i == count - 1)
        begun_s = time.perf_counter()
        status = llama_cpp.llama_decode(self._context, batch)
        llama_cpp.llama_synchronize(self._context)
        taken_s = time.perf_counter() - begun_s
        llama_cpp.llama_batch_free(batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        return taken_s


def main() -> int:
    """Measure and print lines of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompts", default="")
    parser.add_argument("--steps", default="")
    flags = parser.parse_args()
    prompts = [int(length) for length in filter(None, flags.prompts.split(","))]
    cases = [tuple(map(int, case.split("x"))) for case in filter(None, flags.steps.split(","))]
    num_tokens = max([*prompts, *(batch * (context + _SPARE_TOKENS) for batch, context in cases)])
    steps = Steps(flags.path, flags.threads, max([1, *(batch for batch, _ in cases)]), num_tokens)
    for length in prompts:
        times = []
        for _ in range(_NUM_PROMPTS):
            steps.begin()
            times.append(steps.prompt_s(0, length))
        _say(str(length), min(times))
    for batch, context in cases:
        steps.begin()
        for sequence in range(batch):
            steps.prompt_s(sequence, context)
        _say(f"{batch}x{context}", statistics.median(steps.step_s(batch) for _ in range(_NUM_STEPS)))
    return 0


def _say(case: str, seconds: float) -> None:
    sys.stdout.write(json.dumps({"case": case, "seconds": seconds}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
