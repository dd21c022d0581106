"""How good drafts from text are: `python -m tests.engine.speculation.text_drafts FILE`.

FILE has answers, one a line. `--model FOLDER` makes it: what that model says at temperature 0 to prompts of several
kinds; files of this repository as later changes left them, as if a model had edited the older ones without a fault; and
its pages, as prose. Answers end where they begin to say the same again and again, which small models do.

Answers are read token by token as an engine would say them, one after another as those of one tenant. Each draft is
compared with what came, and nothing is computed. Tokens a step are those of steps in which every draft is verified.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec

from baton import LLM, SamplingParams
from baton.bench.numbers import NONE
from baton.engine.models.identity import find_checkpoint
from baton.engine.scheduler.proposer import Draft, Wanted
from baton.engine.scheduler.request import Request
from baton.engine.text.chat_template import ChatTemplate
from baton.engine.text.tokenizer import Tokenizer
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams
from tests.engine.speculation.text_proposers import proposer_of
from tests.measured import rows_of
from tests.system.speculation_work import KINDS

ROOT = Path(__file__).parents[3]
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "n-gram of 5": {"method": "ngram"},
    "n-gram of 2": {"method": "ngram", "prompt_lookup_min": 2},
    "suffix": {"method": "suffix", "suffix_decoding_max_cached_requests": 0},
    "suffix, tenant": {"method": "suffix"},
}
_PREDICTED = "suffix, tenant, prediction"
_MAX_TOKENS, _MAX_DRAFTS, _NUM_LEVELS = 256, 16, 8
_LOOP = 24
_NUM_CHANGES, _NUM_TASKS = 25, 6


class Answer(msgspec.Struct):
    """What was said to a prompt of this kind."""

    kind: str
    prompt_ids: list[int]
    output_ids: list[int]
    prediction_ids: list[int]


def record(file: Path, model: str) -> None:
    """Ask the model, and write what it says; and what people have written."""
    folder = find_checkpoint(model)
    tokenizer, template = Tokenizer.from_folder(folder), ChatTemplate.from_folder(folder)

    def encoded(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    tasks = [make(number) for make in KINDS.values() for number in range(_NUM_TASKS)]
    texts = [
        template.render([{"role": "user", "content": task.question}], add_generation_prompt=True) for task in tasks
    ]
    params = SamplingParams(temperature=0, max_tokens=_MAX_TOKENS)
    said = LLM(model, num_threads=2).generate([encoded(text) for text in texts], params)
    answers = [
        Answer(task.kind, list(answer.prompt_token_ids), list(answer.token_ids), encoded(task.copied))
        for task, answer in zip(tasks, said, strict=True)
    ]
    for old, new in _changes():
        prediction = f"```python\n{old}```"
        prompt_ids = encoded(f"Change this file.\n{prediction}\n")
        answers.append(Answer("change", prompt_ids, encoded(f"```python\n{new}```"), encoded(prediction)))
    for page in sorted((ROOT / "docs").glob("*.md"))[:12]:
        prose = [each for each in page.read_text().split("\n\n") if len(each) > 200 and each[0].isalpha()]
        answers.append(Answer("prose", encoded("Tell me about it."), encoded("\n\n".join(prose))[:600], []))
    for answer in answers:
        answer.output_ids = answer.output_ids[: _num_before_loop(answer.output_ids)]
    file.write_bytes(msgspec.json.Encoder().encode_lines(answers))


def _num_before_loop(token_ids: Sequence[int]) -> int:
    seen = set[tuple[int, ...]]()
    for end in range(_LOOP, len(token_ids) + 1):
        last = tuple(token_ids[end - _LOOP : end])
        if last in seen:
            return end - _LOOP
        seen.add(last)
    return len(token_ids)


def _changes() -> Iterator[tuple[str, str]]:
    """Python files of a moderate size before and after a commit, the newest first."""
    found = 0
    for commit in _git("log", "--format=%h", "-200").split():
        for name in _git("diff-tree", "--no-commit-id", "--name-only", "-r", "--diff-filter=M", commit).split():
            if name.endswith(".py"):
                old, new = _git("show", f"{commit}~:{name}"), _git("show", f"{commit}:{name}")
                if 800 < len(old) < 6000 and found < _NUM_CHANGES:
                    found += 1
                    yield old, new


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, timeout=60, stdout=subprocess.PIPE).stdout.decode()


@dataclass(slots=True)
class Seen:
    """What came of the drafts of one setting: by kind of answer, and by method and level of confidence."""

    steps: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    drafted: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    tried: Counter[tuple[str, int]] = field(default_factory=Counter)
    right: Counter[tuple[str, int]] = field(default_factory=Counter)

    def verified(self, draft: Draft, num_right: int) -> None:
        """The first `num_right` tokens came."""
        for place, confidence in enumerate(draft.confidences[: num_right + 1]):
            level = min(_NUM_LEVELS - 1, int(confidence * _NUM_LEVELS))
            self.tried[draft.method, level] += 1
            self.right[draft.method, level] += place < num_right


def replayed(answers: Sequence[Answer], config: Mapping[str, Any], *, with_prediction: bool) -> Seen:
    """The answers as requests with these drafts would say them."""
    proposer, seen = proposer_of(json.dumps({"num_speculative_tokens": _MAX_DRAFTS, **config})), Seen()
    assert proposer is not None
    for number, answer in enumerate(answers):
        prediction = tuple(answer.prediction_ids) if with_prediction else ()
        params = DecodingParams(prediction_ids=prediction)
        request = Request(RequestKey.numbered(number), Prompt.of(answer.prompt_ids), params, b"", 10**6)
        while (num_said := len(request.token_ids) - request.num_prompt_tokens) < len(answer.output_ids):
            rest = answer.output_ids[num_said:]
            (draft,) = proposer.propose([Wanted(request, _MAX_DRAFTS)])
            pairs = zip(draft.token_ids, rest, strict=False)
            num_right = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
            seen.verified(draft, num_right)
            seen.drafted[answer.kind] += len(draft.token_ids)
            seen.accepted[answer.kind] += num_right
            seen.steps[answer.kind] += 1
            seen.tokens[answer.kind] += min(num_right + 1, len(rest))
            request.token_ids += rest[: num_right + 1]
        proposer.forget(request)
    return seen


def tables(answers: Sequence[Answer]) -> Iterator[tuple[str, dict[str, dict[str, str]]]]:
    """Tokens a step and the share of drafted tokens that were right, by kind of answer; what confidence was worth."""
    seen = {name: replayed(answers, config, with_prediction=False) for name, config in SETTINGS.items()}
    seen[_PREDICTED] = replayed(answers, SETTINGS["suffix, tenant"], with_prediction=True)
    kinds = list(dict.fromkeys(answer.kind for answer in answers))
    per_step = {
        kind: {name: f"{each.tokens[kind] / each.steps[kind]:.2f}" for name, each in seen.items()} for kind in kinds
    }
    yield "tokens a step", per_step
    yield (
        "drafted tokens that were right",
        {
            kind: {name: _share(each.accepted[kind], each.drafted[kind]) for name, each in seen.items()}
            for kind in kinds
        },
    )
    worth: dict[str, dict[str, str]] = {}
    for name in ("n-gram of 2", _PREDICTED):
        for (method, level), tried in sorted(seen[name].tried.items()):
            row = worth.setdefault(f"{level / _NUM_LEVELS:.3f} to {(level + 1) / _NUM_LEVELS:.3f}", {})
            row[method] = f"{seen[name].right[method, level] / tried:.2f} of {tried}"
    yield "confidence", dict(sorted(worth.items()))


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.2f} of {whole}" if whole else NONE


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.engine.speculation.text_drafts", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", help="a checkpoint whose answers are written to the file first")
    asked = parser.parse_args(arguments)
    if asked.model:
        record(asked.file, asked.model)
    for heading, cells in tables(msgspec.json.Decoder(Answer).decode_lines(asked.file.read_bytes())):
        sys.stdout.write("\n".join(f"| {' | '.join(row)} |" for row in rows_of(heading, cells)) + "\n\n")


if __name__ == "__main__":
    main()
