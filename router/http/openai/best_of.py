"""`best_of`: of all that was generated for a prompt, the choices that the client gets.

Those with the highest mean log probability per token, the best first; of equals the earlier one. The token that ended
a choice counts, one that a stop string has cut off does not. Does not know requests in flight, nodes or formats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from baton.router.http.openai.replies import FinishedChoice
from baton.router.http.openai.schemas import CompletionRequest


def best_choices(candidates: Sequence[FinishedChoice], request: CompletionRequest) -> list[FinishedChoice]:
    """What the client of `request` gets of the candidates of all prompts, numbered anew. It sees the log probabilities
    by which they were compared only if it asked for some."""
    found: list[FinishedChoice] = []
    for start in range(0, len(candidates), request.num_candidates):
        of_prompt = candidates[start : start + request.num_candidates]
        found += sorted(of_prompt, key=_mean_logprob, reverse=True)[: request.n]
    if request.logprobs is None:
        found = [_without_logprobs(choice) for choice in found]
    return [replace(choice, index=index) for index, choice in enumerate(found)]


def _mean_logprob(choice: FinishedChoice) -> float:
    """The mean over its reported tokens; without any the lowest, because nothing speaks for the choice."""
    logprobs = [entry.chosen.logprob for entry in choice.whole.entries if entry.chosen is not None]
    return sum(logprobs) / len(logprobs) if logprobs else -math.inf


def _without_logprobs(choice: FinishedChoice) -> FinishedChoice:
    entries = [entry._replace(chosen=None, top=()) for entry in choice.whole.entries]
    return replace(choice, whole=choice.whole._replace(entries=entries))
