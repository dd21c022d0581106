"""The steps of a series whose requests all take the largest logit, or the largest that their grammar allows: each is
computed from where the one before it left its arrays, and of any request nothing is read but its matcher.

Owns the tokens that such a step samples, which are the inputs of the next one, and remembers which step that is. What
the steps compute is what `ModelRunner` computes for them. On a host whose kernels compute all of a step.

Letters: N rows, one for each request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.engine.attention.native_backend import NativeAttention
from baton.engine.native.library import Kernels
from baton.engine.runner.forward import DueRows
from baton.engine.runner.native_sampling import LargestTokens
from baton.engine.runner.plain_rows import plain_tokens, tokens_by_key
from baton.engine.runner.recorded_layers import RecordedLayers
from baton.engine.runner.sampled_rows import GrammarRow
from baton.engine.runner.sampler import Sampler
from baton.engine.scheduler.reading import RowsRead
from baton.engine.scheduler.step import SampledToken, SampledTokens, Step
from baton.wire.request_key import RequestKey


@dataclass(frozen=True, slots=True)
class SampledStep:
    """A step whose tokens are known already."""

    keys: Sequence[RequestKey]
    tokens: Sequence[SampledToken | None]

    def result(self) -> Mapping[RequestKey, SampledTokens]:
        """Its tokens, by request; nobody waits."""
        return tokens_by_key(self.keys, self.tokens)

    def rows_read(self) -> Mapping[RequestKey, RowsRead]:
        """Nothing: such a step has nothing of a prompt."""
        return {}


class GreedySeries:
    """Computes steps by `layers` over the KV of `attention`, by which all other steps are planned too."""

    def __init__(self, layers: RecordedLayers, attention: NativeAttention, kernels: Kernels, sampler: Sampler) -> None:
        """Nothing of a step of `layers` needs torch: entering its inference mode would take as long as all else."""
        self._layers = layers
        self._attention = attention
        self._kernels = kernels
        self._sampler = sampler
        self._series: object | None = None
        self._number = 0
        self._keys: list[RequestKey] = []
        self._largest: LargestTokens | None = None
        self._grammar_rows: list[GrammarRow] = []

    def planned(self, step: Step) -> None:
        """`step` was computed in another way. Its series may go on here if it has just begun."""
        self._series, self._number, self._largest = (None if step.number else step.series), 0, None

    def launch(self, step: Step) -> SampledStep | None:
        """Compute `step`; None: it does not follow the step before, or has rows that need more."""
        series, largest = self._series, self._largest
        if series is None or step.series is not series or step.number != self._number + 1:
            return None
        self._series = None  # unless all goes well
        if largest is None and not all(
            share.params.takes_largest_allowed and not share.prompt.media and not share.prompt.adapter
            for share in step.shares
        ):
            return None
        stays = self._attention.plan_next()
        if largest is None:
            largest = self._begin(step)
        elif stays:
            self._layers.repeat()
        else:
            self._compute(largest)
        token_ids, is_valid = largest.find()
        for each in self._sampler.keep_to_grammars(self._grammar_rows, largest.logits, token_ids, is_valid):
            largest.replace(each.row, token_ids[each.row])
        self._series, self._number = series, step.number
        return SampledStep(self._keys, plain_tokens(token_ids, is_valid))

    def _begin(self, step: Step) -> LargestTokens:
        """Compute the first step here, whose tokens the requests know."""
        self._keys = [share.key for share in step.shares]
        self._grammar_rows = self._sampler.largest_rows(step.shares)
        self._largest = LargestTokens(
            self._kernels, [share.token_ids[share.start + step.number] for share in step.shares]
        )
        self._compute(self._largest)
        return self._largest

    def _compute(self, largest: LargestTokens) -> None:
        count = len(self._keys)
        stream = self._layers(largest.token_ids, self._attention.starts[:count])
        largest.read(stream.logits(DueRows(count, None)))
