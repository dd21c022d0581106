"""The interface between an engine and whatever computes its steps.

Owns nothing but the contract: anything that maps a step to tokens can stand behind an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from engine.scheduler.request import RequestKey, SampledToken, Step

LayerStored: TypeAlias = Callable[[], None]
"""Called as often as the model has layers, each time when the KV of one more of them will not change any more in the
blocks of the step; on any thread. The last calls may come shortly after the step's result."""


class RunningStep(Protocol):
    """A step that was launched."""

    def result(self) -> Mapping[RequestKey, SampledToken]:
        """Wait until it is computed; a token for each request whose share `needs_sample`.

        A request for which the model computed no number gets none. Raises whatever the device raises; no KV of the
        step may be relied on then, and nothing writes into its blocks any more. `DeviceFailed`: nothing at all may be.
        """
        ...


class Runner(Protocol):
    """Computes steps.

    `overlaps`: a step may be launched while the one before it runs. The token that the one before draws is then
    `PENDING_TOKEN` in the shares of the later one, and the runner puts the drawn one in its place.
    """

    overlaps: bool

    def launch(self, step: Step, layer_stored: LayerStored | None = None) -> RunningStep:
        """Begin to store the KV of the step's tokens and to draw the tokens that are due.

        Everything the runner needs of `step` is read before this returns. Raises as `RunningStep.result`; nothing of
        the step is being computed any more then.
        """
        ...


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """A step that was computed before its launch returned."""

    tokens: Mapping[RequestKey, SampledToken]

    def result(self) -> Mapping[RequestKey, SampledToken]:
        """See `RunningStep.result`."""
        return self.tokens
