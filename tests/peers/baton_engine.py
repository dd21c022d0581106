"""Baton's prompts, decode steps and perplexity: `python -m tests.peers.baton_engine MODEL --set quantization=int4`.

Steps are those of an engine without a server around it, with the sampling of a greedy token. The KV of a step's context
is noise, which takes as long to read as any other.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields
from functools import cached_property

from baton.bench.limits.engine_process import EngineSteps
from baton.engine.settings import EngineSettings
from baton.offline.llm import LLM
from baton.runtime.process import keep_freed_memory
from baton.wire.sampling import SamplingParams
from tests.peers.work import SPARE_TOKENS, Work, measure

_BLOCK_SIZE = 16


class Baton:
    """See `tests.peers.work.Engine`."""

    def __init__(self, work: Work) -> None:
        parser = argparse.ArgumentParser()
        parser.add_argument("--set", nargs="*", default=(), metavar="NAME=VALUE")
        chosen = dict(each.split("=", 1) for each in parser.parse_args(work.rest).set)
        texts = {each.name for each in fields(EngineSettings) if each.type == "str"}
        if unknown := chosen.keys() - texts:
            raise SystemExit(f"this version of Baton has no setting {', '.join(unknown)} that is a word")
        num_tokens = max(work.max_batch, 1) * (work.max_context + SPARE_TOKENS)
        self._settings = EngineSettings(
            work.model,
            num_threads=work.num_threads,
            max_num_seqs=work.max_batch,
            block_size=_BLOCK_SIZE,
            num_blocks=-(-num_tokens // _BLOCK_SIZE) + work.max_batch,
            speculative_config="none",
            **chosen,
        )

    def prompt_s(self, token_ids: Sequence[int]) -> float:
        return self._steps.prefill_s(len(token_ids))

    def steps_s(self, prompts: Sequence[Sequence[int]], num_steps: int) -> list[float]:
        return self._steps.decode(len(prompts), len(prompts[0]), num_steps).step_s

    def log_probabilities(self, token_ids: Sequence[int]) -> Sequence[float]:
        answer = self._llm.generate(token_ids, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))[0]
        return [each.logprob for each in answer.prompt_logprobs if each is not None]

    @cached_property
    def _steps(self) -> EngineSteps:
        return EngineSteps(self._settings)

    @cached_property
    def _llm(self) -> LLM:
        values = {each.name: getattr(self._settings, each.name) for each in fields(EngineSettings)}
        return LLM(**values)


if __name__ == "__main__":
    keep_freed_memory()
    measure(Baton)
