"""What a step costs by its number of rows: how much longer it takes when it verifies a few tokens more.

Kernels compute rows in tiles, so the cost is a staircase, and a formula does not tell where a step is nearly free. Owns
seconds seen for each number of rows of steps without prompts, of which older ones count less and less, and a line
through them for what was not seen lately: a number of rows that was timed wrong once is tried again. Knows no drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate

MOST_ROWS = 128
"""Steps of more rows teach nothing, and cost what the line says."""
_KEPT = 0.99
_SEEN_WEIGHT = 1.0
"""The line counts as so many steps of each number of rows."""
_USUAL_SLOPE, _SLOPE_WEIGHT = 0.05, 0.5
"""What a row more is taken to cost, as a share of a step of one, by a weight of so many steps."""
_LEAST_SLOPE = 0.005
_LARGEST_FACTOR = 2.0
_STEPS_A_FIT = 8


class RowCosts:
    """Learns from the seconds of steps in which requests only decode, without what their contexts cost."""

    def __init__(self) -> None:
        self._weights = [0.0] * (MOST_ROWS + 1)
        self._sums = [0.0] * (MOST_ROWS + 1)
        self._steps = [0] * (MOST_ROWS + 1)
        self._num_steps = 0
        self._table: list[float] = []
        self._slope = 0.0

    @property
    def is_known(self) -> bool:
        """Whether a step has been seen."""
        return bool(self._table)

    def seconds(self, num_rows: int) -> float:
        """Of a step of so many rows; relative to one row's as long as nothing is known."""
        if not self._table:
            return 1.0 + _USUAL_SLOPE * num_rows
        last = len(self._table) - 1
        return self._table[min(num_rows, last)] + self._slope * max(0, num_rows - last)

    def learn(self, num_rows: int, seconds: float) -> None:
        """A step of `num_rows` rows has taken so long."""
        if num_rows > MOST_ROWS:
            return
        if self._table:
            expected = self.seconds(num_rows)
            seconds = min(max(seconds, expected / _LARGEST_FACTOR), expected * _LARGEST_FACTOR)
        self._num_steps += 1
        kept = _KEPT ** (self._num_steps - self._steps[num_rows])
        self._steps[num_rows] = self._num_steps
        self._weights[num_rows] = self._weights[num_rows] * kept + 1.0
        self._sums[num_rows] = self._sums[num_rows] * kept + seconds
        if self._num_steps % _STEPS_A_FIT == 0 or len(self._table) < 2:
            self._fit()

    def _fit(self) -> None:
        """The line through all that was seen, and the table of what each number of rows costs."""
        seen = [(rows, weight) for rows, weight in self._weighted() if weight > 1e-6]
        total = sum([weight for _, weight in seen])
        means = {rows: self._sums[rows] / self._weights[rows] for rows, _ in seen}
        middle = sum([rows * weight for rows, weight in seen]) / total
        mean = sum([means[rows] * weight for rows, weight in seen]) / total
        square = sum([weight * (rows - middle) ** 2 for rows, weight in seen])
        product = sum([weight * (rows - middle) * (means[rows] - mean) for rows, weight in seen])
        usual = _USUAL_SLOPE * mean / (1.0 + _USUAL_SLOPE * middle)
        slope = (product + _SLOPE_WEIGHT * usual) / (square + _SLOPE_WEIGHT)
        self._slope = max(slope, _LEAST_SLOPE * mean)
        self._table = self._tabulate(dict(seen), means, lambda rows: mean + self._slope * (rows - middle))

    def _tabulate(
        self, weights: Mapping[int, float], means: Mapping[int, float], line: Callable[[int], float]
    ) -> list[float]:
        """What each number of rows costs. More rows never cost less, and what was not seen costs no more than what was
        seen of more rows."""
        found = [0.0] * (max(means) + 1)
        for rows in range(len(found) - 1, 0, -1):
            weight = weights.get(rows, 0.0)
            found[rows] = (weight * means.get(rows, 0.0) + _SEEN_WEIGHT * max(0.0, line(rows))) / (
                weight + _SEEN_WEIGHT
            )
            if weight < _SEEN_WEIGHT and rows + 1 < len(found):
                found[rows] = min(found[rows], found[rows + 1])
        return list(accumulate(found, max))

    def _weighted(self) -> list[tuple[int, float]]:
        """Numbers of rows with the weight that what was seen of them has now."""
        return [
            (rows, weight * _KEPT ** (self._num_steps - step))
            for rows, (weight, step) in enumerate(zip(self._weights, self._steps, strict=True))
            if weight
        ]
