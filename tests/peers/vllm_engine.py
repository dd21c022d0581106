"""vLLM's prompts, decode steps and perplexity, with a Python that has its CPU build:

    LD_PRELOAD=libtcmalloc_minimal.so.4:libiomp5.so PYTHON -m tests.peers.vllm_engine FOLDER --threads 2 --prompts 512

The engine runs in this process, without a server: a step is one call of its `step`, with the sampling of greedy tokens.
What is preloaded are its better settings. FOLDER is a checkpoint as a method of quantization publishes it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from itertools import count
from typing import Any

from tests.peers.work import SPARE_TOKENS, Work, measure

_FIRST_STEPS = 4
"""Of a batch, not counted: the scheduler may launch one before it has collected the last."""


class Vllm:
    """See `tests.peers.work.Engine`."""

    def __init__(self, work: Work) -> None:
        cores = sorted(os.sched_getaffinity(0))[: work.num_threads]
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_CPU_KVCACHE_SPACE": "2",
        }
        import vllm  # reads the environment

        self._vllm: Any = vllm
        self._llm: Any = vllm.LLM(
            work.model,
            dtype="bfloat16",
            max_model_len=work.max_context + SPARE_TOKENS,
            max_num_seqs=work.max_batch,
            max_num_batched_tokens=max(2048, work.max_context + SPARE_TOKENS),
            enable_prefix_caching=False,
            disable_log_stats=True,
        )
        self._numbers = count()

    def prompt_s(self, token_ids: Sequence[int]) -> float:
        self._ask(token_ids, 1)
        begun_s = time.perf_counter()
        self._end()
        return time.perf_counter() - begun_s

    def steps_s(self, prompts: Sequence[Sequence[int]], num_steps: int) -> list[float]:
        tokens = {self._ask(prompt, num_steps + _FIRST_STEPS + len(prompts)): 0 for prompt in prompts}
        while min(tokens.values()) < _FIRST_STEPS:
            tokens |= {output.request_id: len(output.outputs[0].token_ids) for output in self._llm.llm_engine.step()}
        times_s = []
        for _ in range(num_steps):
            begun_s = time.perf_counter()
            self._llm.llm_engine.step()
            times_s.append(time.perf_counter() - begun_s)
        self._end()
        return times_s

    def log_probabilities(self, token_ids: Sequence[int]) -> Sequence[float]:
        params = self._vllm.SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        prompt = self._vllm.TokensPrompt(prompt_token_ids=list(token_ids))
        found = self._llm.generate([prompt], params, use_tqdm=False)[0].prompt_logprobs
        pairs = zip(found[1:], token_ids[1:], strict=True)
        return [at_place[token_id].logprob for at_place, token_id in pairs]

    def _ask(self, token_ids: Sequence[int], max_tokens: int) -> str:
        request_id = f"{next(self._numbers)}"
        prompt = self._vllm.TokensPrompt(prompt_token_ids=list(token_ids))
        params = self._vllm.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        self._llm.llm_engine.add_request(request_id, prompt, params)
        return request_id

    def _end(self) -> None:
        while self._llm.llm_engine.has_unfinished_requests():
            self._llm.llm_engine.step()


if __name__ == "__main__":
    measure(Vllm)
