"""The public JSON-Schema-Test-Suite: which keywords are enforced, and which are refused.

    pip download --no-deps --no-binary :all: jsonschema && tar xzf jsonschema-*.tar.gz
    python -m tests.structured.keywords jsonschema-*/json/tests/draft2020-12 --validator /tmp/jsonschema/bin/python

The suite is in the source archive of `jsonschema`. Every schema of it is refused with a reason, or it compiles. Then
answers of a random-weight model must be valid by it (see `tests.structured.validator`), and its grammar must accept no
example that the suite calls invalid. A grammar may reject valid ones: it wants members in the order of the schema.
Prints a line of a Markdown table for each file, reasons behind it, and exits with 1 on an answer or an example that is
wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.engine.structured.vocabulary import Vocabulary
from baton.engine.text.tokenizer import Tokenizer
from baton.wire.errors import InvalidRequest
from baton.wire.grammar import Grammar
from tests.checkpoints import make_checkpoint
from tests.structured.engine_answers import EngineAnswers
from tests.structured.validator import errors_of

_TEMPERATURES = (0.0, 1.5, 1.5)


@dataclass(slots=True)
class Keyword:
    """What one file of the suite has shown. `wrong`: invalid answers, and invalid examples that are accepted."""

    name: str
    num_schemas: int = 0
    num_compiled: int = 0
    num_answers: int = 0
    num_cut: int = 0
    num_rejected: int = 0
    num_invalid: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    @property
    def line(self) -> str:
        """Of the table."""
        reasons = "; ".join(f"{reason} ({count})" for reason, count in self.reasons.most_common(3))
        return (
            f"| {self.name} | {self.num_compiled} of {self.num_schemas} | {self.num_answers}, {self.num_cut} cut "
            f"| {self.num_rejected} of {self.num_invalid} | {reasons} |"
        )


class Checker:
    """Checks schemas with the model in `folder`."""

    def __init__(self, folder: Path, validator: str) -> None:
        self._engine = EngineAnswers(folder, seed=1)
        self._vocabulary = Vocabulary.from_folder(folder, Tokenizer.from_folder(folder).eos_token_ids)
        self._validator = validator

    def check(self, file: Path) -> Keyword:
        """All schemas of a file of the suite."""
        keyword, served = Keyword(file.stem), []
        for case in json.loads(file.read_text()):
            keyword.num_schemas += 1
            grammar = Grammar.json_schema(case["schema"], "")
            try:
                compiled = self._vocabulary.compile(grammar)
            except InvalidRequest as error:
                keyword.reasons[error.message[:70].replace("|", "\\|")] += 1
                continue
            keyword.num_compiled += 1
            served.append((case["schema"], grammar))
            for example in case["tests"]:
                if not example["valid"]:
                    self._reject(keyword, case["schema"], compiled.deep_copy(), example["data"])
        self._answer(keyword, served)
        return keyword

    def _reject(self, keyword: Keyword, schema: Any, matcher: Any, data: Any) -> None:
        text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
        token_ids = self._vocabulary.tokens.tokenize_str(text)
        keyword.num_invalid += 1
        if matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting():
            keyword.wrong.append(f"accepts {text} by {json.dumps(schema)}")
        else:
            keyword.num_rejected += 1

    def _answer(self, keyword: Keyword, served: Sequence[tuple[Any, Grammar]]) -> None:
        answers = self._engine.answers([grammar for _, grammar in served], _TEMPERATURES)
        keyword.num_answers = len(answers)
        whole = [(served[each.place][0], each.text) for each in answers if each.finish_reason != "length"]
        keyword.num_cut = len(answers) - len(whole)
        for (schema, text), error in zip(whole, errors_of(self._validator, whole), strict=True):
            if error:
                keyword.wrong.append(f"{text!r} is not valid by {json.dumps(schema)}: {error}")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.structured.keywords", description=__doc__)
    parser.add_argument("suite", type=Path, help="folder of a draft, or of its formats (optional/format)")
    parser.add_argument("--validator", required=True, help="a Python that has jsonschema[format]")
    flags = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        checker = Checker(make_checkpoint(Path(folder) / "model", "qwen2"), flags.validator)
        found = [checker.check(file) for file in sorted(flags.suite.glob("*.json"))]
    sys.stdout.write("| keyword | schemas compiled | answers | invalid examples rejected | refused because |\n")
    sys.stdout.write("| --- | --- | --- | --- | --- |\n")
    for keyword in found:
        sys.stdout.write(keyword.line + "\n")
    for keyword in found:
        for wrong in keyword.wrong:
            sys.stdout.write(f"WRONG {keyword.name}: {wrong[:600]}\n")
    return 1 if any(keyword.wrong for keyword in found) else 0


if __name__ == "__main__":
    sys.exit(main())
