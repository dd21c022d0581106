"""What a schema costs answers that were asked for as JSON: `python -m baton.bench.limits.grammar_answers [--rounds
60]`.

`baton.bench.limits.grammar_step` measures steps of a model that wants to write something else, whose tokens are
refused. Here the demo model is asked for an object, and writes it with a schema or without: what the schema allows is
what is written anyway, and what it forces takes no step. A batch of such questions is answered in turns with the schema
and without, from the first token of all answers to the last one of any, by the clock and by the processor time of all
threads. Lower quartiles, and the median ratio of neighbouring rounds.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from baton.bench.limits.grammar_step import ratio_line
from baton.engine.build import build_engine
from baton.engine.core import EngineCore
from baton.engine.models.identity import find_checkpoint
from baton.engine.runner.kv_memory import allocate_private
from baton.engine.settings import EngineSettings
from baton.engine.text.chat_template import ChatTemplate
from baton.engine.text.tokenizer import Tokenizer
from baton.wire.grammar import Grammar
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams

_COUNTRIES = ("France", "Portugal", "Spain", "Italy", "Germany", "Norway", "Sweden", "Japan")
_QUESTION = "What is the capital of {}? Answer in JSON with country and capital."
_NAMES = ("country", "capital")
_SCHEMA = Grammar.json_schema(
    {
        "type": "object",
        "properties": {name: {"type": "string"} for name in _NAMES},
        "required": list(_NAMES),
        "additionalProperties": False,
    }
)
_MAX_TOKENS = 64


class Answers(NamedTuple):
    """Seconds until the last of a batch of answers was written, the tokens behind the first ones, and their steps."""

    clock_s: float
    cpu_s: float
    num_tokens: int
    num_steps: int


def answer(core: EngineCore, prompts: Sequence[Sequence[int]], temperature: float, grammar: Grammar | None) -> Answers:
    """Of all `prompts` at once."""
    for number, prompt in enumerate(prompts):
        params = DecodingParams(temperature=temperature, seed=number, max_tokens=_MAX_TOKENS, grammar=grammar)
        core.add(RequestKey.numbered(number + 1), prompt, params)
    begun = set[RequestKey]()
    while len(begun) < len(prompts):
        begun.update(output.key for output in core.step() if output.token is not None)
    clock_s, cpu_s, num_tokens, num_steps = time.perf_counter(), time.process_time(), 0, 0
    while core.request_keys():
        outputs = core.step()
        num_tokens += sum(1 + len(output.forced) for output in outputs)
        num_steps += 1
    return Answers(time.perf_counter() - clock_s, time.process_time() - cpu_s, num_tokens, num_steps)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m baton.bench.limits.grammar_answers", description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    flags = parser.parse_args(argv)
    settings = EngineSettings(num_threads=flags.threads, max_num_seqs=len(_COUNTRIES))
    core, folder = build_engine(settings, allocate_private).core, find_checkpoint("", weights=False)
    template, tokenizer = ChatTemplate.from_folder(folder), Tokenizer.from_folder(folder)
    prompts = [
        tokenizer.encode(template.render([{"role": "user", "content": _QUESTION.format(each)}])) for each in _COUNTRIES
    ]
    for temperature in (0.0, 0.8):
        rounds = [
            [answer(core, prompts, temperature, grammar) for grammar in (None, _SCHEMA)]
            for _ in range(flags.rounds + 1)
        ][1:]  # the first is for caches, and for the schema to be compiled
        free, bound = zip(*rounds, strict=True)
        told = ", ".join(f"{each.num_tokens} tokens in {each.num_steps} steps" for each in rounds[0])
        sys.stdout.write(f"temperature {temperature:g}, without the schema and with it: {told}\n")
        for place, what in enumerate(("clock", "processor")):
            sys.stdout.write(ratio_line(what, [each[place] for each in free], [each[place] for each in bound]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
