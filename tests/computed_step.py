"""A step of a runner that computes during the launch, for tests that need no asynchronous scheduling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from baton.engine.scheduler.reading import RowsRead
from baton.engine.scheduler.step import SampledTokens
from baton.wire.request_key import RequestKey


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """A `RunningStep` whose tokens were sampled before its launch returned."""

    tokens: Mapping[RequestKey, SampledTokens]

    def result(self) -> Mapping[RequestKey, SampledTokens]:
        """See `RunningStep.result`."""
        return self.tokens

    def rows_read(self) -> Mapping[RequestKey, RowsRead]:
        """See `RunningStep.rows_read`."""
        return {}
