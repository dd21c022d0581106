"""Tokens and log probabilities of ranks do not depend on the batch.

Run it with `python -m tests.ranks.executor.invariant_ranks MODEL`.

Requests are computed one by one and all together by `--tensor-parallel-size` ranks with `--batch-invariant`; every bit
has to be the same. In a model of usual size the sums of one token are small ones for `baton.ranks.executor.world`, and
those of a chunk are large ones, so that both ways to add up are compared. `--load-format dummy` needs no weights.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence

from baton import LLM, SamplingParams

_LONGEST = 300


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare; 0 when all is the same."""
    parser = argparse.ArgumentParser(prog="python -m tests.ranks.executor.invariant_ranks", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--tensor-parallel-size", type=int, default=4)
    parser.add_argument("--pipeline-parallel-size", type=int, default=1)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--requests", type=int, default=12)
    asked = parser.parse_args(arguments)
    llm = LLM(
        asked.model,
        batch_invariant=True,
        tensor_parallel_size=asked.tensor_parallel_size,
        pipeline_parallel_size=asked.pipeline_parallel_size,
        load_format=asked.load_format,
        dtype=asked.dtype,
        num_blocks=512,
        # small chunks cut prompts at other places when others share the step
        max_num_batched_tokens=128,
        enable_prefix_caching=False,
    )
    chance = random.Random(7)
    prompts = [[chance.randrange(1000) for _ in range(chance.randrange(3, _LONGEST))] for _ in range(asked.requests)]
    num_tokens = 0
    for temperature in (0.0, 1.3):
        sampling = SamplingParams(temperature=temperature, seed=11, max_tokens=12, ignore_eos=True, logprobs=3)
        alone = [llm.generate(prompt, sampling)[0] for prompt in prompts]
        together = llm.generate(prompts, sampling)
        for one, other in zip(alone, together, strict=True):
            assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs), (one, other)
            num_tokens += len(one.token_ids)
    sys.stdout.write(f"{num_tokens} tokens alone and together: every bit is the same\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
