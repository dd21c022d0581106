"""Passes of a draft model over requests: what the scheduler's steps are to the model, between them and beside them.

Owns what such a pass costs, learned from the passes themselves, and that nothing is overwritten which a store has not
saved yet. Knows nothing of what was computed before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton.engine.attention.base import LayerStored
from baton.engine.cache.offload import KvOffload
from baton.engine.runner.base import Runner, RunningStep
from baton.engine.scheduler.request import ScheduledRequest
from baton.engine.scheduler.step import SampledTokens, Step
from baton.engine.scheduler.step_costs import StepCosts
from baton.wire.request_key import RequestKey
from baton.wire.step_cost import StepWork


class DraftPasses:
    """Computed by `runner`, of at most `max_tokens` tokens. `block_size`: of the pool; `offload`: where its evicted
    blocks go."""

    def __init__(self, runner: Runner, max_tokens: int, block_size: int, offload: KvOffload | None = None) -> None:
        self.runner = runner
        self.max_tokens = max_tokens
        self.costs = StepCosts()
        self._block_size = block_size
        self._offload = offload

    def compute(self, shares: Sequence[ScheduledRequest]) -> Mapping[RequestKey, SampledTokens]:
        """Store the draft KV of `shares`, and wait for the tokens of those that need a sample. Raises whatever the
        device raises."""
        step = Step(tuple(shares))
        if self._offload is not None and self._offload.has_unsaved:
            for share in shares:
                first, end = share.start // self._block_size, -(-share.context_len // self._block_size)
                self._offload.overwriting(share.block_table[first:end])
        self.costs.launched(step)
        try:
            sampled = self.runner.launch(step).result()
        except Exception:
            self.costs.lost()
            raise
        self.costs.collected()
        return sampled

    def launch(self, shares: Sequence[ScheduledRequest], layer_stored: LayerStored | None) -> RunningStep:
        """Begin to store the draft KV of `shares`, in blocks that a step writes into, too."""
        return self.runner.launch(Step(tuple(shares)), layer_stored)

    def prompt_s(self, num_tokens: int, start: int) -> float:
        """The seconds that tokens of a prompt take from place `start` on; 0 as long as that is not known."""
        cost = self.costs.cost
        return 0.0 if cost is None or not cost.knows_prompts else cost.step_s + cost.tokens_s(num_tokens, start)

    def decode_s(self, num_rows: int, num_context_tokens: int) -> float:
        """The seconds of a pass with one token of `num_rows` requests; 0 as long as that is not known."""
        cost = self.costs.cost
        return 0.0 if cost is None else cost.seconds(StepWork(0, 0, num_rows, num_context_tokens))
