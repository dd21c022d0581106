"""How long the steps of an engine take: a few numbers that a node finds out about itself, and what follows from them.

Owns the formula. `baton.engine.scheduler.step_costs` fits its parameters to the steps of one engine; the router
predicts with them. A prediction decides where work goes and how much of it a step takes, never what a token is: a wrong
one costs time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

from baton.wire.codec import Bounds

_Seconds = Annotated[float, Bounds(0, 1e6)]
PLANNED_SHARE = 0.88
"""The share of a goal between tokens that a step is planned for: where streams and prompts share all steps, an error of
the prediction makes every one of them miss."""
SMALLEST_CHUNK = 16
"""A prompt always goes on by so many tokens, however little time there is."""


class StepWork(NamedTuple):
    """The work of a step: tokens of prompts, and pairs of such a token and one it attends to. Then requests that decode
    one token, and the tokens that those attend to."""

    num_prompt_tokens: int
    num_prompt_pairs: int
    num_decodes: int
    num_context_tokens: int


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step, and of each thing that a `StepWork` counts."""

    step_s: _Seconds
    prompt_token_s: _Seconds
    prompt_pair_s: _Seconds
    decode_s: _Seconds
    context_token_s: _Seconds

    @property
    def knows_prompts(self) -> bool:
        """Whether the engine has computed a prompt: one costs nothing else."""
        return self.prompt_token_s + self.prompt_pair_s > 0

    def with_prompts_of(self, other: StepCost) -> StepCost:
        """These costs, with the cost of prompts of `other` if this one does not know its own."""
        if self.knows_prompts:
            return self
        return replace(self, prompt_token_s=other.prompt_token_s, prompt_pair_s=other.prompt_pair_s)

    def seconds(self, work: StepWork) -> float:
        """The seconds that a step with this work takes."""
        return (
            self.step_s
            + self.prompt_token_s * work.num_prompt_tokens
            + self.prompt_pair_s * work.num_prompt_pairs
            + self.decode_s * work.num_decodes
            + self.context_token_s * work.num_context_tokens
        )

    def without_prompt_s(self, num_decodes: int, num_context_tokens: int) -> float:
        """The time of a step in which requests only decode."""
        return self.step_s + self.decode_s * num_decodes + self.context_token_s * num_context_tokens

    def chunk_within(self, seconds: float, start: int) -> int:
        """Tokens of a prompt, from place `start` on, that take at most so long. For costs that know prompts."""
        # each token attends to one more: n * (token_s + pair_s * (start + 1/2)) + n^2 * pair_s / 2 = seconds
        if seconds <= 0:
            return 0
        linear, square = self.prompt_token_s + self.prompt_pair_s * (start + 0.5), self.prompt_pair_s / 2
        return int(2 * seconds / (linear + math.sqrt(linear * linear + 4 * square * seconds)))

    def prompt_s(self, num_tokens: int, start: int, chunk: int, num_decodes: int, num_context_tokens: int) -> float:
        """The seconds until `num_tokens` tokens of a prompt from place `start` on are computed. `chunk` of them are in
        a step, and other requests decode in the same steps."""
        num_steps = -(-num_tokens // chunk)
        return num_steps * self.without_prompt_s(num_decodes, num_context_tokens) + self.tokens_s(num_tokens, start)

    def tokens_s(self, num_tokens: int, start: int) -> float:
        """The seconds that tokens of a prompt from place `start` on take, without the steps that they are in."""
        pairs = num_tokens * start + num_tokens * (num_tokens + 1) // 2
        return self.prompt_token_s * num_tokens + self.prompt_pair_s * pairs
