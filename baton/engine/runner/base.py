"""The interface between an engine and the runner that computes its steps.

Owns nothing but the contract: anything that maps a step to tokens can stand behind an engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from baton.engine.attention.base import LayerStored
from baton.engine.scheduler.reading import RowsRead
from baton.engine.scheduler.step import SampledTokens, Step
from baton.wire.request_key import RequestKey


class RunningStep(Protocol):
    """A step that was launched."""

    def result(self) -> Mapping[RequestKey, SampledTokens]:
        """Wait until it is computed; a token for each request whose share `needs_sample`, and one for each of its
        drafts behind that.

        A request gets no token behind a place for which the model computed NaN, and none at all where that is the
        first. Raises whatever the device raises; the KV of the step must not be used then, and nothing writes into its
        blocks any more. After `DeviceFailed` no KV must be used.
        """
        ...

    def rows_read(self) -> Mapping[RequestKey, RowsRead]:
        """What the step has read: an entry for each of its spans. To be asked after `result`."""
        ...


class Runner(Protocol):
    """Computes steps.

    `is_asynchronous`: a step may be launched while the one before it runs. The token that the one before samples is
    then `PENDING_TOKEN` in the shares of the later one, and the runner puts the sampled one in its place.
    """

    is_asynchronous: bool

    def launch(self, step: Step, layer_stored: LayerStored | None = None) -> RunningStep:
        """Begin to store the KV of the step's tokens and to sample the tokens that are due.

        Everything the runner needs of `step` is read before this returns. Raises as `RunningStep.result`; nothing of
        the step is being computed any more then.
        """
        ...
