"""What a grammar costs a decode step: `python -m bench.limits.grammar_step [MODEL] [--batch 8] [--rounds 10]`.

One engine decodes a batch of requests that must write JSON, and the same batch without a grammar, in turns. The lower
quartiles of both and their ratio are printed, by the clock and by the processor time of all threads, which a busy
machine changes less; and the median ratio of neighbouring rounds. Many short rounds say more than a few long ones.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from engine.build import build_engine
from engine.core import EngineCore
from engine.runner.kv_memory import allocate_private
from engine.settings import EngineSettings
from wire.grammar import Grammar
from wire.request_key import RequestKey
from wire.sampling import DecodingParams

NUM_STEPS = 40
_PROMPT = tuple(range(20, 52))
_SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "minItems": 1000,
}
"""So long that no answer of the measurement ends."""


class Round(NamedTuple):
    """Seconds of a decode step with all requests in it: the median by the clock, and the processor time of a mean
    one, and that for each of its tokens: where a grammar forces tokens a step has more of them."""

    wall_s: float
    cpu_s: float
    token_cpu_s: float


def measure_round(core: EngineCore, batch: int, grammar: Grammar | None) -> Round:
    """Of `NUM_STEPS` steps."""
    keys = [RequestKey.numbered(number + 1) for number in range(batch)]
    for number, key in enumerate(keys):
        params = DecodingParams(
            temperature=0.8, seed=number, max_tokens=8 * NUM_STEPS, ignore_eos=True, grammar=grammar
        )
        core.add(key, _PROMPT, replace(params, grammar=grammar))
    while len(core.step()) < batch:
        continue
    times, num_tokens = [], 0
    cpu_begun_s = time.process_time()
    for _ in range(NUM_STEPS):
        begun_s = time.perf_counter()
        outputs = core.step()
        times.append(time.perf_counter() - begun_s)
        num_tokens += sum(1 + len(output.forced) for output in outputs)
    cpu_s = time.process_time() - cpu_begun_s
    for key in keys:
        core.abort(key)
    return Round(statistics.median(times), cpu_s / NUM_STEPS, cpu_s / num_tokens)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.limits.grammar_step", description=__doc__)
    parser.add_argument("model", nargs="?", default="", help="checkpoint; the demo model when absent")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--load-format", default="auto", help="dummy: random weights of the shape that MODEL has")
    flags = parser.parse_args(argv)
    settings = EngineSettings(
        model=flags.model, num_threads=flags.threads, max_num_seqs=flags.batch, load_format=flags.load_format
    )
    core = build_engine(settings, allocate_private).core
    grammar = Grammar.json_schema(_SCHEMA)
    measure_round(core, flags.batch, grammar)
    free: list[Round] = []
    bound: list[Round] = []
    for _ in range(flags.rounds):
        free.append(measure_round(core, flags.batch, None))
        bound.append(measure_round(core, flags.batch, grammar))
    sys.stdout.write(f"batch {flags.batch}, {flags.rounds} rounds\n")
    for place, name in enumerate(("clock, a step", "processor, a step", "processor, a token")):
        sys.stdout.write(_line(name, [each[place] for each in free], [each[place] for each in bound]))
    return 0


def _line(name: str, free: Sequence[float], bound: Sequence[float]) -> str:
    ratios = [with_one / without for with_one, without in zip(bound, free, strict=True)]
    without, with_one = _lower_quartile(free), _lower_quartile(bound)
    return (
        f"{name}: {1000 * without:.3f} ms without a grammar, {1000 * with_one:.3f} ms with one, "
        f"ratio {with_one / without:.3f}; of neighbouring rounds {statistics.median(ratios):.3f} "
        f"({min(ratios):.3f} to {max(ratios):.3f})\n"
    )


def _lower_quartile(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 4]


if __name__ == "__main__":
    sys.exit(main())
