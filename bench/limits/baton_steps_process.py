"""Baton's prompts and decode steps for `baton.bench.limits.step_turns`.

python -m baton.bench.limits.baton_steps_process MODEL

With `--tensor-parallel-size` and `--pipeline-parallel-size` those of several ranks, which divide `--threads` among
them. As a file it measures other versions of Baton, of which it needs `EngineSteps`:
`env -C TREE PYTHONPATH=TREE python .../bench/limits/baton_steps_process.py MODEL`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from baton.bench.limits.engine_process import EngineSteps
from baton.bench.numbers import median
from baton.engine.settings import EngineSettings
from baton.runtime.process import keep_freed_memory

_NUM_PROMPTS, _NUM_STEPS = 3, 24
_BLOCK_SIZE = 16
_SPARE_TOKENS = 64
_RANKS = ("tensor_parallel_size", "pipeline_parallel_size")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print lines of JSON."""
    parser = argparse.ArgumentParser(prog="python -m baton.bench.limits.baton_steps_process", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompts", default="")
    parser.add_argument("--steps", default="")
    for name in _RANKS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=1)
    flags = parser.parse_args(argv)
    prompts = [int(length) for length in flags.prompts.split(",") if length]
    steps = [
        (int(batch), int(context)) for each in flags.steps.split(",") if each for batch, context in [each.split("x")]
    ]
    # older versions have no such settings
    ranks = {name: getattr(flags, name) for name in _RANKS if getattr(flags, name) > 1}
    num_tokens = max([*(batch * (context + _SPARE_TOKENS) for batch, context in steps), *prompts]) + _SPARE_TOKENS
    keep_freed_memory()
    settings = EngineSettings(
        model=flags.model,
        num_threads=flags.threads,
        max_num_seqs=max([1, *(batch for batch, _ in steps)]),
        block_size=_BLOCK_SIZE,
        num_blocks=1 - -num_tokens // _BLOCK_SIZE,
        **ranks,
    )
    engine = EngineSteps(settings)
    for length in prompts:
        _say(str(length), min(engine.prefill_s(length) for _ in range(_NUM_PROMPTS)))
    for batch, context in steps:
        _say(f"{batch}x{context}", median(engine.decode(batch, context, _NUM_STEPS).step_s))
    if ranks:
        engine.engine.executor.close()
    return 0


def _say(case: str, seconds: float) -> None:
    sys.stdout.write(json.dumps({"case": case, "seconds": seconds}) + "\n")


if __name__ == "__main__":
    sys.exit(main())
