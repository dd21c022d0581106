"""The runner of rank 0: before it computes a step, it has the other ranks compute the same.

Owns the one order of a step and what has to happen in which place of it, since all ranks share one KV memory:

- Blocks are copied, and begun blocks wiped, by this rank alone, before it adds up the embedding. Every rank attends
  after that sum, so none reads a block that is not prepared, and none wipes what another has stored.
- A layer counts as stored when every rank has stored its heads of it. That is certain once the ranks have added up
  what the layer's attention returned, so each layer is told with the next one, and the last one after the step.

The other ranks have no queues and sample nothing: what a step says is all that they know. When a step fails here after
it was ordered, the ranks may be anywhere in it: the node has to end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from device.base import DeviceFailed
from engine.attention.base import LayerStored
from engine.attention.torch_backend import begun_blocks
from engine.executor.base import Leader
from engine.executor.messages import Compute, Share
from engine.runner.base import RunningStep
from engine.runner.inputs import StepInputs
from engine.runner.model_runner import ModelRunner, due_requests
from engine.runner.prompt_scoring import scored_rows
from engine.scheduler.request import Step


class LeadingRunner(ModelRunner):
    """See `Runner`. `block_size`: tokens of a block; `arguments`: those of `ModelRunner`."""

    def __init__(self, leader: Leader, block_size: int, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._leader = leader
        self._block_size = block_size

    def _launch(self, step: Step, inputs: StepInputs, layer_stored: LayerStored | None) -> RunningStep:
        try:
            self._wipe_begun(step)
            self._leader.tell(_order(step, inputs))
            stored = None if layer_stored is None else _OneLater(layer_stored)
            launched = super()._launch(step, inputs, stored)
            if stored is not None:
                stored.finish()
            return launched
        except Exception as error:
            raise self._leader.reason_of(error) from error

    def _wipe_begun(self, step: Step) -> None:
        """See `begun_blocks`: a backend leaves it to the runner where blocks are shared."""
        for block in begun_blocks(step.requests, self._block_size):
            self._blocks[block].zero_()


class _OneLater:
    """Tells of each layer when the next is stored. See `LayerStored`."""

    def __init__(self, layer_stored: LayerStored) -> None:
        self._layer_stored = layer_stored
        self._is_first = True

    def __call__(self) -> None:
        if not self._is_first:
            self._layer_stored()
        self._is_first = False

    def finish(self) -> None:
        """All ranks have computed the step: tell of the last layer."""
        self._layer_stored()


def _order(step: Step, inputs: StepInputs) -> Compute:
    """The step in plain values. No token is pending: with ranks, a step is collected before the next is launched."""
    if inputs.has_pending:
        raise DeviceFailed("a token that is still sampled cannot be told to other ranks")
    shares = tuple(
        Share(each.start, each.num_tokens, np.asarray(each.block_table, dtype=np.int32).tobytes())
        for each in step.requests
    )
    due, _ = due_requests(step, inputs)
    scored: Sequence[int] = scored_rows(step, inputs.last_tokens).tolist() if step.spans else ()
    return Compute(shares, inputs.token_ids.tobytes(), _rows(scored), _rows(due))


def _rows(rows: Sequence[int]) -> bytes:
    return np.array(rows, dtype=np.int64).tobytes()
