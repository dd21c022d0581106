"""What drafts in one engine, from its weights to its place beside the scheduler.

Owns the order: layers for drafts are loaded with the model's, follow its runner before the first step, and have KV in
its blocks. Text drafts before layers do, and alone where there are none. What the settings choose is
`baton.engine.speculation.choose`'s.
"""

from __future__ import annotations

from dataclasses import replace

from baton.engine.cache.block_pool import BlockPool
from baton.engine.cache.draft_coverage import DraftCoverage
from baton.engine.cache.offload import KvOffload
from baton.engine.first_costs import measure_first_costs
from baton.engine.model_shard import Basis, ModelShard
from baton.engine.runner.base import Runner
from baton.engine.runner.kv_memory import KvMemory
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.scheduler.draft_depth import DraftDepth
from baton.engine.scheduler.drafts import Speculation
from baton.engine.scheduler.limits import SchedulerLimits
from baton.engine.scheduler.live_requests import LiveRequests
from baton.engine.scheduler.proposer import Proposer
from baton.engine.scheduler.step_bound import StepBound
from baton.engine.scheduler.step_costs import StepCosts
from baton.engine.speculation.choose import why_no_drafts
from baton.engine.speculation.draft_model.loading import load_draft
from baton.engine.speculation.draft_model.model import DraftModel, draft_model
from baton.engine.speculation.heads.building import FollowingHead, follow, load_head
from baton.engine.speculation.settings import read_asked, text_proposer
from baton.engine.speculation.text_first import TextFirst

_MOST_DRAFT_BLOCKS = 16
"""A model with states has some MB in each block: more drafts in a step would cost prompts their room."""


class Drafting:
    """Of the engine of `basis` and `model`. `given`: a proposer whose drafts are all verified, in place of those that
    the settings ask for. `coverage`: which blocks have draft KV, where a draft model needs to know."""

    def __init__(self, basis: Basis, model: ModelShard, given: Proposer | None) -> None:
        """Loads what drafts need of weights. Raises `ModelLoadError`."""
        self.coverage: DraftCoverage | None = None
        self._basis = basis
        self._given = given
        self._asked = read_asked(basis.settings.speculative_config)
        self._decoder, self._head = load_draft(basis), load_head(basis, model)
        self._model: DraftModel | None = None
        self._following: FollowingHead | None = None

    def with_states(self, memory: KvMemory) -> KvMemory:
        """`memory` whose last blocks hold the states behind drafts, where layers have some. Several ranks have no way
        to tell each other which drafts were right."""
        is_wanted = self._asked is not None or self._given is not None
        if not (is_wanted and memory.layout.has_states) or self._basis.settings.num_ranks > 1:
            return memory
        num_blocks = memory.num_blocks
        draft_blocks = range(num_blocks - min(_MOST_DRAFT_BLOCKS, num_blocks // 8), num_blocks)
        return replace(memory, paged=replace(memory.paged, draft_blocks=draft_blocks))

    def follow(self, memory: KvMemory, runner: ModelRunner) -> None:
        """A head, if there is one, sees each step of `runner` from now on. Raises `InvalidSetting`."""
        if self._head is not None:
            self._following = follow(self._basis, self._head, memory, runner)

    def open_model(self, memory: KvMemory, offload: KvOffload | None) -> None:
        """A draft model, if there is one, can be computed from now on. Raises `InvalidSetting`."""
        if self._decoder is not None:
            self._model = draft_model(self._basis, self._decoder, memory, offload)

    def speculation(
        self, costs: StepCosts, bound: StepBound | None, pool: BlockPool, offload: KvOffload | None
    ) -> Speculation | None:
        """What the scheduler has of it; None where nothing was asked for."""
        if self._given is not None:
            return Speculation(self._given)
        if self._asked is None:
            return None
        layers = self._proposer_of_layers(pool, offload)
        text = text_proposer(self._asked)
        costs.learns_rows = True
        why = why_no_drafts(self._basis.settings, self._basis.config)
        depth = DraftDepth(costs, bound)
        proposer = text if layers is None else TextFirst(text, layers, depth.is_declined)
        return Speculation(proposer, depth, "" if why is None else why.reason)

    def beside(self, runner: Runner, requests: LiveRequests) -> Runner:
        """`runner`, with the draft KV of prompts that are computed for other nodes."""
        if self._model is None or self.coverage is None:
            return runner
        return self._model.beside(runner, self._basis.device, self.coverage, requests)

    def learn_costs(self, limits: SchedulerLimits) -> None:
        """Find out what small steps of a draft model cost. Only before the first request."""
        if self._model is not None:
            measure_first_costs(self._model.passes.runner, self._model.passes.costs, limits)

    def _proposer_of_layers(self, pool: BlockPool, offload: KvOffload | None) -> Proposer | None:
        if self._model is not None:
            self.coverage = DraftCoverage(pool, self._basis.settings.block_size)
            return self._model.proposer(self.coverage)
        return None if self._following is None else self._following.proposer(pool, offload)
