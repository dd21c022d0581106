"""What the steps of this engine cost, found out from the steps themselves.

Owns the fit of a `StepCost`: least squares over relative errors, in which older steps count less and less, with no
negative parameter. A parameter that no recent step tells anything about keeps its value. Memory is a few dozen numbers.

Prompts that are all of one length do not tell what their tokens cost and what the pairs of tokens do. How these are to
each other is expected of the model (`baton.engine.models.model_costs`) and counts less than a single step: it decides
where steps do not, and hardly anything where they do. What else they do not tell apart counts as the cost of requests.

A step that takes far longer than predicted counts as three times the prediction: the processor was somewhere else. When
steps have really become slower, each one raises the prediction that far, so it follows within a few dozen. It is the
same the other way, since a step counts the more the shorter it was. A step that computes media teaches nothing.
The first one with a prompt is believed as it is, where there is no prediction.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from baton.engine.scheduler.row_costs import RowCosts
from baton.engine.scheduler.step import Step
from baton.wire.step_cost import SMALLEST_CHUNK, StepCost, StepWork

_KEPT, _KEPT_WHEN_WRONG = 0.998, 0.95
"""What a step's weight is after one more: half after 350 steps, or after 14 when predictions have been wrong lately."""
_WRONG = 0.5
_SCALES = (1.0, 64.0, 65536.0, 8.0, 8192.0)
"""Usual sizes of what is counted: parameters of about the same size are found sooner."""
_TOKEN, _PAIR = _PROMPTS = 1, 2
_OTHERS = (3, 0, 4)
"""Requests that decode, the step itself, contexts."""
USUAL_PAIR = 1e-4
"""What a pair costs, in tokens, of a model of which nothing is known."""
_EXPECTED_STEPS, _EXPECTED_SHARE = 0.1, 0.03
"""What is expected of the model may be wrong by half where a step is by a sixth, so it counts as a tenth of one; and as
at most so many of those with prompts, so that few or old ones are not overruled."""
_FIRST_STEPS = 16
_ONE_OF = 4
"""Of steps with hardly anything of a prompt, which resemble each other, one of so many teaches: a small model's step is
short, and where grammars force tokens most steps have some of them as a chunk."""
_STEPS_A_FIT = 16
_SWEEPS = 24
_LARGEST_FACTOR = 3.0
_ERROR_SHARE = 0.02
_SMALLEST_S = 1e-6


def work_of(step: Step) -> StepWork:
    """What `step` computes. The last token of a prompt alone counts as decoding, which it is like. So does each draft,
    but a request reads its context once."""
    if step.series is not None:
        return StepWork(0, 0, len(step.shares), step.context)
    chunks = [share for share in step.requests if share.num_tokens != 1 + share.num_drafts]
    decodes = len(step.requests) - len(chunks) + sum([share.num_drafts for share in step.requests])
    context = sum([share.start for share in step.requests])
    prompt = pairs = 0
    for share in chunks:
        count = share.num_tokens
        prompt += count
        pairs += count * share.start + count * (count + 1) // 2
        context -= share.start
    return StepWork(prompt, pairs, decodes, context)


class StepCosts:
    """Learns what steps cost, from the steps themselves. Steps end in the order in which they were launched; one that
    is launched while another is computed begins when that one ends. `pair_in_tokens`: what a pair is expected to cost,
    in tokens."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter, pair_in_tokens: float = USUAL_PAIR) -> None:
        self.rows = RowCosts()
        """What rows cost in steps without prompts; learned where `learns_rows`."""
        self.learns_rows = False
        self.cost: StepCost | None = None
        """The last fit, None before the first."""
        self.relative_error = 0.0
        """How far predictions were off lately, as a share of the step."""
        self._clock = clock
        self._launched: deque[tuple[float, StepWork, bool]] = deque()
        self._ended_s = -math.inf
        # lists: numpy takes ten times as long for so few numbers when a step has emptied the caches
        self._products = [[0.0] * len(_SCALES) for _ in _SCALES]
        self._sums = [0.0] * len(_SCALES)
        self._parameters = [0.0] * len(_SCALES)
        self._expected_pair = pair_in_tokens * _SCALES[_PAIR] / _SCALES[_TOKEN]
        self._num_steps = 0
        self._num_learned = 0

    def know(self) -> None:
        """Predict from what was learned so far, however little it is."""
        self._fit()

    @property
    def expected_s(self) -> float | None:
        """How long the oldest step in flight takes, as far as that is known."""
        if self.cost is None or not self._launched:
            return None
        work = self._launched[0][1]
        return None if work.num_prompt_tokens and not self.cost.knows_prompts else self.cost.seconds(work)

    def launched(self, step: Step) -> None:
        """`step` is about to be launched."""
        # a series computes no media, and its shares are in no cache: nothing else of a step looks at them
        teaches = step.series is not None or not any(
            share.prompt.media and share.computes_media for share in step.requests
        )
        self._launched.append((self._clock(), work_of(step), teaches))

    def collected(self) -> None:
        """The oldest step in flight was computed."""
        begun_s, work, teaches = self._launched.popleft()
        begun_s, self._ended_s = max(begun_s, self._ended_s), self._clock()
        self._num_steps += 1
        if not teaches:
            return
        if self.learns_rows and not work.num_prompt_tokens:
            contexts_s = 0.0 if self.cost is None else self.cost.context_token_s * work.num_context_tokens
            self.rows.learn(work.num_decodes, max(self._ended_s - begun_s - contexts_s, _SMALLEST_S))
        if work.num_prompt_tokens > SMALLEST_CHUNK or self._num_steps <= _FIRST_STEPS or self._num_steps % _ONE_OF == 0:
            self._learn(work, max(self._ended_s - begun_s, _SMALLEST_S))

    def lost(self) -> None:
        """The steps in flight have failed."""
        self._launched.clear()

    def _learn(self, work: StepWork, seconds: float) -> None:
        features = _features(work)
        is_first = self.cost is not None and work.num_prompt_tokens > 0 and not self.cost.knows_prompts
        if self.cost is not None and not is_first:
            predicted = sum(map(float.__mul__, features, self._parameters))
            error = abs(predicted - seconds) / seconds
            self.relative_error += _ERROR_SHARE * (min(error, 1.0) - self.relative_error)
            predicted = max(predicted, _SMALLEST_S)
            seconds = min(max(seconds, predicted / _LARGEST_FACTOR), _LARGEST_FACTOR * predicted)
        features = [each / seconds for each in features]
        kept = _KEPT if self.relative_error < _WRONG else _KEPT_WHEN_WRONG
        for row, feature in zip(self._products, features, strict=True):
            row[:] = [kept * each + feature * other for each, other in zip(row, features, strict=True)]
        self._sums = [kept * each + feature for each, feature in zip(self._sums, features, strict=True)]
        self._num_learned += 1
        if is_first or self._num_learned % _STEPS_A_FIT == 0:
            self._fit()

    def _fit(self) -> None:
        """One parameter after the other, each as good as it can be beside the others, again and again; those first that
        shall have what is not told apart."""
        products, sums, parameters = self._products, self._sums, self._parameters
        for _ in range(_SWEEPS):
            self._fit_prompts()
            for number in _OTHERS:
                row = products[number]
                if row[number] > 0.0:
                    rest = sum(map(float.__mul__, row, parameters)) - row[number] * parameters[number]
                    parameters[number] = max(0.0, (sums[number] - rest) / row[number])
        self.cost = StepCost(*(each / scale for each, scale in zip(parameters, _SCALES, strict=True)))

    def _fit_prompts(self) -> None:
        """Tokens and pairs at once, as good as they can be beside the others: one after the other they would take
        thousands of fits where prompts are alike."""
        parameters, expected = self._parameters, self._expected_pair
        of_token, of_pair = (self._products[number] for number in _PROMPTS)
        token_square, both, pair_square = of_token[_TOKEN], of_token[_PAIR], of_pair[_PAIR]
        token_sum, pair_sum = (
            self._sums[number] - sum([self._products[number][other] * parameters[other] for other in _OTHERS])
            for number in _PROMPTS
        )
        if not token_square or (token := parameters[_TOKEN] or token_sum / token_square) <= 0.0:
            return
        # as if one more step had told that a pair costs what is expected of it, by its relative error
        weight = min(_EXPECTED_STEPS, _EXPECTED_SHARE * token_square * token**2) / (expected * token) ** 2
        with_tokens = token_square + weight * expected**2
        with_pairs, with_both = pair_square + weight, both - weight * expected
        determinant = with_tokens * with_pairs - with_both**2
        token = (token_sum * with_pairs - pair_sum * with_both) / determinant
        pair = (pair_sum * with_tokens - token_sum * with_both) / determinant
        if pair < 0.0:
            token, pair = token_sum / token_square, 0.0
        elif token < 0.0:
            token, pair = 0.0, pair_sum / pair_square
        parameters[_TOKEN], parameters[_PAIR] = max(0.0, token), max(0.0, pair)


def _features(work: StepWork) -> list[float]:
    """The step itself and what it counts, each by its scale."""
    return [count / scale for count, scale in zip((1.0, *work), _SCALES, strict=True)]
