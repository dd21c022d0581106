"""Random schemas, and whether every answer of random-weight models is valid by its schema or honestly cut.

    python -m tests.structured.campaign --schemas 2000 --relay-schemas 600 --validator /tmp/jsonschema/bin/python

Every schema is answered greedily and at temperature 1.5, by an engine (prompts share prefixes; of some outputs a second
engine continues from the ids alone), and some over a relay of two prefill and two decode nodes, of which one is killed
every two seconds. `jsonschema` says what is valid (see `tests.structured.validator`), formats included, and what an
answer's own check says must be the same. Prints counts, and exits with 1 on an answer that is neither valid nor cut.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from baton.wire.grammar import Grammar
from tests.checkpoints import make_checkpoint
from tests.structured import relay_answers
from tests.structured.engine_answers import MAX_TOKENS, EngineAnswers
from tests.structured.schemas import Schemas
from tests.structured.validator import errors_of

_TEMPERATURES = (0.0, 1.5)
_BATCH = 50
_FAMILIES = ("qwen2", "llama")


class Tally:
    """Counts answers, and writes those that are wrong."""

    def __init__(self, validator: str) -> None:
        self.counts: Counter[str] = Counter()
        self._validator = validator

    def add(self, where: str, answers: Sequence[tuple[dict[str, Any], str, str]]) -> None:
        """Schemas, texts and finish reasons."""
        whole = [(schema, text) for schema, text, reason in answers if reason == "stop"]
        self.counts[f"{where}: cut"] += sum(reason == "length" for _, _, reason in answers)
        self.counts[f"{where}: no end"] += sum(reason not in ("stop", "length") for _, _, reason in answers)
        for (schema, text), error in zip(whole, errors_of(self._validator, whole), strict=True):
            self.counts[f"{where}: {'INVALID' if error else 'valid'}"] += 1
            if error:
                sys.stdout.write(f"{where}: {error}\n  {json.dumps(schema)}\n  {text!r}\n")

    @property
    def is_right(self) -> bool:
        """Whether nothing was invalid, or without an end."""
        return not any(count for name, count in self.counts.items() if name.endswith(("INVALID", "no end", "failed")))


def _engine_part(folder: Path, schemas: Sequence[dict[str, Any]], num_prompts: int, seed: int, tally: Tally) -> None:
    engine = EngineAnswers(make_checkpoint(folder / f"model-{seed}", _FAMILIES[seed % 2]), seed)
    for first in range(0, len(schemas), _BATCH):
        batch = schemas[first : first + _BATCH]
        # of each two one without white space, of which random models are fond
        grammars = [Grammar.json_schema(schema, "" if place % 2 else None) for place, schema in enumerate(batch)]
        refusals = [engine.refusal(grammar) for grammar in grammars]
        served = [place for place, refusal in enumerate(refusals) if not refusal]
        for refusal in filter(None, refusals):
            tally.counts[f"refused: {refusal[:80]}"] += 1
        answers = engine.answers([grammars[place] for place in served], _TEMPERATURES * num_prompts)
        assert all(answer.num_tokens == MAX_TOKENS for answer in answers if answer.finish_reason == "length")
        tally.counts["engine: tokens"] += sum(answer.num_tokens for answer in answers)
        tally.counts["engine: forced tokens"] += sum(answer.num_forced for answer in answers)
        tally.add("engine", [(batch[served[each.place]], each.text, _reason(each.finish_reason)) for each in answers])
    tally.counts["engine: continued elsewhere"] += engine.num_moved
    tally.counts["engine: cached prompt tokens"] += engine.num_cached_tokens


def _reason(finish_reason: str) -> str:
    return "stop" if finish_reason == "complete" else finish_reason


def _relay_part(folder: Path, schemas: Sequence[dict[str, Any]], seed: int, tally: Tally) -> None:
    model = make_checkpoint(folder / "relay-model", "llama")
    vocabulary = EngineAnswers(model, seed)
    served = [schema for schema in schemas if not vocabulary.refusal(Grammar.json_schema(schema))]
    with relay_answers.relay_of_four(model, folder / "relay") as relay:
        answers, num_killed = relay_answers.ask_all(relay, served, _TEMPERATURES, seed)
    tally.counts["relay: nodes killed"] += num_killed
    for answer in answers:
        if answer.error:
            tally.counts["relay: failed"] += 1
            sys.stdout.write(f"relay: {answer.error}\n")
    tally.add("relay", [(served[each.place], each.text, each.finish_reason) for each in answers if not each.error])


def main(argv: Sequence[str] | None = None) -> int:
    """Run both parts."""
    parser = argparse.ArgumentParser(prog="python -m tests.structured.campaign", description=__doc__)
    parser.add_argument("--schemas", type=int, default=2000)
    parser.add_argument("--relay-schemas", type=int, default=600)
    parser.add_argument("--prompts", type=int, default=2, help="for each schema and temperature, of the engine")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--validator", required=True, help="a Python that has jsonschema[format]")
    flags = parser.parse_args(argv)
    begun_s, tally, source = time.monotonic(), Tally(flags.validator), Schemas(flags.seed)
    with tempfile.TemporaryDirectory() as folder:
        half = flags.schemas // 2
        for part, count in enumerate((half, flags.schemas - half)):
            _engine_part(Path(folder), [source.next() for _ in range(count)], flags.prompts, flags.seed + part, tally)
        if flags.relay_schemas:
            _relay_part(Path(folder), [source.next() for _ in range(flags.relay_schemas)], flags.seed, tally)
    for name, count in sorted(tally.counts.items()):
        sys.stdout.write(f"{name}: {count}\n")
    sys.stdout.write(f"{time.monotonic() - begun_s:.0f} s, seed {flags.seed}\n")
    return 0 if tally.is_right else 1


if __name__ == "__main__":
    sys.exit(main())
