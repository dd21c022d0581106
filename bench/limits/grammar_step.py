"""What a grammar costs a decode step: `python -m baton.bench.limits.grammar_step [MODEL] [--batch 8] [--rounds 10]`.

One engine decodes a batch of requests, without a grammar and with one in each of them, in turns. Three grammars are
measured: objects, of which many tokens are forced, so that steps have more of them; a text, in which nothing is forced,
so that steps have as many tokens as without a grammar; and anything, which refuses no token, as the grammar of a model
that writes what it was asked for. The first two refuse a third of what the demo model draws. The prompt is
the beginning of a story: behind a few random tokens the model wants to end the text, and with a grammar, where no end
is possible yet, each end that it draws is drawn again.

By the clock, which is the time that a step takes, and by the processor time of all threads, which a busy machine
changes less: the lower quartiles of all rounds and their ratio, and the median ratio of neighbouring rounds. Many short
rounds say more than a few long ones.

Of a larger model `--shapes` needs no weights; its steps are long, so that few are enough: `MODEL --shapes --steps 8
--rounds 6`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from baton.engine.build import build_engine
from baton.engine.core import EngineCore
from baton.engine.models.identity import find_checkpoint
from baton.engine.runner.kv_memory import allocate_private
from baton.engine.settings import EngineSettings
from baton.engine.text.tokenizer import Tokenizer
from baton.wire.grammar import Grammar
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams

_BLANK = "\u0120"
"""As which tokenizers write a blank."""
_CONSONANTS, _VOWELS = "bcdfghjklmnpqrstvwxz", "aeiou"
_PROMPT = (
    "Once upon a time there was a curious fox named Sara who lived in a big city. Sara was given an important letter"
)
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
GRAMMARS = {
    "objects": Grammar.json_schema(_SCHEMA),
    "a text": Grammar.regex("([a-z]{1,9} ){1000}"),
    "anything": Grammar.regex(r"(.|\n){1,1000000}"),
}


class Round(NamedTuple):
    """Seconds of a decode step with all requests in it, and of each of its tokens: by the clock, the step's as a median
    and the token's as a mean, and as processor time."""

    step_s: float
    token_s: float
    step_cpu_s: float
    token_cpu_s: float
    tokens_per_step: float


def measure_round(
    core: EngineCore, prompt: Sequence[int], batch: int, num_steps: int, temperature: float, grammar: Grammar | None
) -> Round:
    """Of `num_steps` steps."""
    keys = [RequestKey.numbered(number + 1) for number in range(batch)]
    for number, key in enumerate(keys):
        core.add(
            key,
            prompt,
            DecodingParams(
                temperature=temperature, seed=number, max_tokens=8 * num_steps, ignore_eos=True, grammar=grammar
            ),
        )
    while len(core.step()) < batch:
        continue
    times, num_tokens = [], 0
    cpu_begun_s = time.process_time()
    for _ in range(num_steps):
        begun_s = time.perf_counter()
        outputs = core.step()
        times.append(time.perf_counter() - begun_s)
        num_tokens += sum(1 + len(output.forced) for output in outputs)
    cpu_s = time.process_time() - cpu_begun_s
    for key in keys:
        core.abort(key)
    step_s, token_s = statistics.median(times), sum(times) / num_tokens
    return Round(step_s, token_s, cpu_s / num_steps, cpu_s / num_tokens, num_tokens / num_steps)


def write_shapes(model: Path, folder: Path) -> None:
    """A checkpoint in `folder` of the shapes of `model`, with as many tokens as these have a place for: what its
    tokenizer lacks of them are words of a few syllables, every second behind a blank."""
    definition = json.loads((model / "tokenizer.json").read_text())
    known = definition["model"]["vocab"]
    first = 1 + max(*known.values(), *(each["id"] for each in definition["added_tokens"]))
    for token_id in range(first, json.loads((model / "config.json").read_text())["vocab_size"]):
        known[_BLANK * (token_id % 2) + _word(token_id // 2)] = token_id
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        if (model / name).exists():
            shutil.copy(model / name, folder / name)


def _word(number: int) -> str:
    """Of two syllables for numbers below 10,000, else of three or more; another for each."""
    letters = ""
    while number or len(letters) < 4:
        number, syllable = divmod(number, len(_CONSONANTS) * len(_VOWELS))
        letters += _CONSONANTS[syllable % len(_CONSONANTS)] + _VOWELS[syllable // len(_CONSONANTS)]
    return letters


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m baton.bench.limits.grammar_step", description=__doc__)
    parser.add_argument("model", nargs="?", default="", help="checkpoint; the demo model when absent")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.8, help="0: greedy")
    parser.add_argument("--steps", type=int, default=40, help="of a round")
    parser.add_argument("--shapes", action="store_true", help="MODEL's shapes alone: random weights, and random words")
    flags = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        if flags.shapes:
            write_shapes(find_checkpoint(flags.model, weights=False), Path(folder))
        settings = EngineSettings(
            model=folder if flags.shapes else flags.model,
            num_threads=flags.threads,
            max_num_seqs=flags.batch,
            load_format="dummy" if flags.shapes else "auto",
        )
        core = build_engine(settings, allocate_private).core
        prompt = Tokenizer.from_folder(find_checkpoint(settings.model, weights=False)).encode(_PROMPT)
        _measure(core, prompt, flags)
    return 0


def _measure(core: EngineCore, prompt: Sequence[int], flags: argparse.Namespace) -> None:
    kinds = {"": None, **GRAMMARS}
    rounds: dict[str, list[Round]] = {name: [] for name in kinds}
    for number in range(-1, flags.rounds):
        for name, grammar in kinds.items():
            found = measure_round(core, prompt, flags.batch, flags.steps, flags.temperature, grammar)
            if number >= 0:  # the first is for caches, and for grammars to be compiled
                rounds[name].append(found)
    sys.stdout.write(f"batch {flags.batch}, {flags.rounds} rounds, temperature {flags.temperature:g}\n")
    for name in GRAMMARS:
        _report(name, rounds[""], rounds[name])


def _report(name: str, free: Sequence[Round], bound: Sequence[Round]) -> None:
    per_step = [statistics.mean(each.tokens_per_step for each in rounds) for rounds in (free, bound)]
    sys.stdout.write(f"{name}: {per_step[0]:.2f} tokens in a step without a grammar, {per_step[1]:.2f} with one\n")
    for place, what in enumerate(("clock, a step", "clock, a token", "processor, a step", "processor, a token")):
        sys.stdout.write(ratio_line(what, [each[place] for each in free], [each[place] for each in bound]))


def ratio_line(name: str, free: Sequence[float], bound: Sequence[float]) -> str:
    """What rounds have taken, in seconds."""
    ratios = [with_one / without for with_one, without in zip(bound, free, strict=True)]
    without, with_one = _lower_quartile(free), _lower_quartile(bound)
    return (
        f"  {name}: {1000 * without:.4f} ms without a grammar, {1000 * with_one:.4f} ms with one, "
        f"ratio {with_one / without:.3f}; of neighbouring rounds {statistics.median(ratios):.3f} "
        f"({min(ratios):.3f} to {max(ratios):.3f})\n"
    )


def _lower_quartile(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 4]


if __name__ == "__main__":
    sys.exit(main())
