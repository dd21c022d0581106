"""Structured answers of one engine with random weights: many requests at once, prefix hits, and outputs that another
engine continues from the ids alone, as after the death of a node."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.engine.build import build_engine
from baton.engine.core import EngineCore
from baton.engine.runner.kv_memory import allocate_private
from baton.engine.settings import EngineSettings
from baton.engine.structured.vocabulary import Vocabulary
from baton.engine.text.tokenizer import Tokenizer
from baton.wire.errors import InvalidRequest
from baton.wire.grammar import Grammar
from baton.wire.prompt import Prompt
from baton.wire.sampling import DecodingParams
from tests.request_keys import key_of

MAX_TOKENS = 160
_NUM_SHARED = 48
"""Tokens that the prompts have in common: blocks that are found in the prefix cache."""


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """An answer to the schema of number `place`. `num_forced` of its tokens were forced."""

    place: int
    text: str
    finish_reason: str
    num_tokens: int
    num_forced: int


class EngineAnswers:
    """Engines over the checkpoint in `folder`, the second for outputs that are continued."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.tokenizer = Tokenizer.from_folder(folder)
        self.num_moved = 0
        self.num_cached_tokens = 0
        self._vocabulary = Vocabulary.from_folder(folder, self.tokenizer.eos_token_ids)
        self._chance = random.Random(seed)
        self._core, self._other = (_core(folder) for _ in range(2))
        self._shared = [self._chance.randrange(300) for _ in range(_NUM_SHARED)]

    def refusal(self, grammar: Grammar) -> str:
        """Why `grammar` cannot be compiled, "" when it can."""
        try:
            self._vocabulary.compile(grammar)
        except InvalidRequest as error:
            return error.message
        return ""

    def answers(self, grammars: Sequence[Grammar], temperatures: Sequence[float]) -> list[EngineAnswer]:
        """An answer to each grammar at each temperature, all at once. Raises `AssertionError` when a request fails, or
        continues elsewhere with other tokens."""
        cases = [(place, temperature) for place in range(len(grammars)) for temperature in temperatures]
        params = {
            number: DecodingParams(temperature=temperature, seed=number, max_tokens=MAX_TOKENS, grammar=grammars[place])
            for number, (place, temperature) in enumerate(cases)
        }
        prompts = {number: self._prompt() for number in params}
        found = self._run(self._core, prompts, params, {})
        self._continue_some(prompts, params, {number: ids for number, (ids, _, _) in found.items()})
        return [
            EngineAnswer(cases[number][0], self._text(ids, reason), reason, len(ids), num_forced)
            for number, (ids, reason, num_forced) in found.items()
        ]

    def _text(self, token_ids: list[int], finish_reason: str) -> str:
        return self.tokenizer.decode(token_ids[:-1] if finish_reason == "stop" else token_ids)

    def _prompt(self) -> list[int]:
        own = self._chance.choices(range(300), k=self._chance.randint(1, 40))
        return [*self._shared[: self._chance.choice((0, 16, 48))], *own]

    def _continue_some(
        self, prompts: dict[int, list[int]], params: dict[int, DecodingParams], found: dict[int, list[int]]
    ) -> None:
        moved = [number for number in found if len(found[number]) > 1 and self._chance.random() < 0.2]
        known = {number: self._chance.randrange(1, len(found[number])) for number in moved}
        outputs = {number: found[number][: known[number]] for number in moved}
        rest = self._run(self._other, {number: prompts[number] for number in moved}, params, outputs)
        for number in moved:
            whole = found[number][: known[number]] + rest[number][0]
            assert whole == found[number], f"request {number} continues elsewhere with other tokens"
        self.num_moved += len(moved)

    def _run(
        self,
        core: EngineCore,
        prompts: dict[int, list[int]],
        params: dict[int, DecodingParams],
        outputs: dict[int, list[int]],
    ) -> dict[int, tuple[list[int], str, int]]:
        """Tokens, finish reason, and how many were forced."""
        numbers = {key_of(number): number for number in prompts}
        found: dict[int, tuple[list[int], str, int]] = {number: ([], "", 0) for number in prompts}
        for key, number in numbers.items():
            core.add(key, Prompt.of(prompts[number]), params[number], output_ids=outputs.get(number, ()))
        while core.has_work:
            for output in core.step():
                assert not output.has_failed, output.failure
                number = numbers[output.key]
                ids, _, num_forced = found[number]
                if output.tokens:
                    ids += output.token_ids
                    found[number] = (ids, output.finish_reason, num_forced + output.num_forced)
                    self.num_cached_tokens += output.num_cached_tokens if output.output_index == 0 else 0
        core.check()
        return found


def _core(folder: Path) -> EngineCore:
    settings = EngineSettings(model=str(folder), num_threads=1, num_blocks=512, max_num_seqs=32)
    return build_engine(settings, allocate_private).core
