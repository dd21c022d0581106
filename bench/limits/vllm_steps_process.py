"""vLLM's prompts and decode steps for `baton.bench.limits.step_turns`, with a Python that has vLLM:

    LD_PRELOAD=libtcmalloc_minimal.so.4:libiomp5.so python bench/limits/vllm_steps_process.py MODEL

The engine runs in this process, without a server: a step is one call of its `step`, with the sampling of greedy tokens.
What is preloaded are its better settings. A step's sequences have each computed their context: no KV is shared.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}

from vllm import LLM, SamplingParams, TokensPrompt

_NUM_PROMPTS, _NUM_STEPS = 3, 24
_NUM_FIRST_STEPS = 4
"""Steps of a batch that are not counted: the scheduler may launch one before it has collected the last."""
_SPARE_TOKENS = 64


class Steps:
    """One model, with room for `num_sequences` sequences of `num_tokens` tokens each."""

    def __init__(self, model: str, num_sequences: int, num_tokens: int) -> None:
        self._llm = LLM(
            model,
            dtype="bfloat16",
            max_model_len=num_tokens,
            max_num_seqs=num_sequences,
            max_num_batched_tokens=max(2048, num_tokens),
            enable_prefix_caching=False,
            disable_log_stats=True,
        )
        self._chance = random.Random(0)
        self._number = 0

    def prompt_s(self, count: int) -> float:
        """Seconds in which one sequence computes `count` tokens and samples the next."""
        self._ask(count, 1)
        begun_s = time.perf_counter()
        self._end()
        return time.perf_counter() - begun_s

    def steps_s(self, batch: int, context: int, num_steps: int) -> list[float]:
        """Seconds of each of `num_steps` steps with one token of each sequence."""
        engine = self._llm.llm_engine
        tokens = {self._ask(context, _SPARE_TOKENS - 1): 0 for _ in range(batch)}
        while min(tokens.values()) < _NUM_FIRST_STEPS:
            tokens |= {output.request_id: len(output.outputs[0].token_ids) for output in engine.step()}
        times = []
        for _ in range(num_steps):
            begun_s = time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - begun_s)
        self._end()
        return times

    def _ask(self, count: int, max_tokens: int) -> str:
        self._number += 1
        prompt = TokensPrompt(prompt_token_ids=[self._chance.randint(10, 7000) for _ in range(count)])
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        self._llm.llm_engine.add_request(f"{self._number}", prompt, params)
        return f"{self._number}"

    def _end(self) -> None:
        while self._llm.llm_engine.has_unfinished_requests():
            self._llm.llm_engine.step()


def main() -> int:
    """Measure and print lines of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompts", default="")
    parser.add_argument("--steps", default="")
    flags = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[: flags.threads]
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)), "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
    prompts = [int(length) for length in filter(None, flags.prompts.split(","))]
    cases = [tuple(map(int, case.split("x"))) for case in filter(None, flags.steps.split(","))]
    num_tokens = max([*prompts, *(context for _, context in cases)]) + _SPARE_TOKENS
    steps = Steps(flags.model, max([1, *(batch for batch, _ in cases)]), num_tokens)
    for length in prompts:
        _say(str(length), min(steps.prompt_s(length) for _ in range(_NUM_PROMPTS)))
    for batch, context in cases:
        _say(f"{batch}x{context}", statistics.median(steps.steps_s(batch, context, _NUM_STEPS)))
    return 0


def _say(case: str, seconds: float) -> None:
    sys.stdout.write(json.dumps({"case": case, "seconds": seconds}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
