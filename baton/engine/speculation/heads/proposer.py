"""Drafts from a head: it stores the slots that the last step made known, and goes on from its own states.

Owns the chain of guesses, and what it costs. The slots of guesses are written too, and again when the tokens are known.
A guess is the likeliest token, whatever the request's temperature: it is right when the model draws the same.

Letters: N requests that are drafted for, E hidden size.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from baton.device.base import Device
from baton.engine.attention.base import SequenceShare
from baton.engine.models.heads.base import DraftHead
from baton.engine.scheduler.proposer import NO_DRAFT, Draft, DraftCost, Wanted
from baton.engine.scheduler.request import Request
from baton.engine.speculation.heads.blocks import HeadBlocks
from baton.engine.speculation.heads.head_pass import HeadPass
from baton.engine.speculation.heads.slots import HeadSlots, SlotRows

_COST_KEPT = 0.9


@dataclass(slots=True)
class _Chain:
    """Guesses for one request, as far as there are any. `chance`: that all of them are right."""

    wanted: Wanted
    most: int
    token_ids: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    chance: float = 1.0

    @property
    def goes_on(self) -> bool:
        return len(self.token_ids) < self.most and self.chance >= self.wanted.least_chance

    @property
    def share(self) -> SequenceShare:
        """The slot of its last guess."""
        request = self.wanted.request
        return SequenceShare(len(request.token_ids) - 2 + len(self.token_ids), 1, request.block_table)

    def add(self, token_id: int, confidence: float) -> None:
        self.token_ids.append(token_id)
        self.confidences.append(confidence)
        self.chance *= confidence


class HeadProposer:
    """Drafts of a head, of at most `num_tokens` for a request. See `Proposer`."""

    stores_kv = True

    def __init__(
        self,
        method: str,
        head: DraftHead,
        head_pass: HeadPass,
        slots: HeadSlots,
        blocks: HeadBlocks,
        device: Device,
        num_tokens: int,
    ) -> None:
        self.method = method
        self._head = head
        self._pass = head_pass
        self._slots = slots
        self._blocks = blocks
        self._device = device
        self._num_tokens = num_tokens
        self._token_s = 0.0

    def follows(self, request: Request) -> bool:
        """Always true: hidden states are kept of steps that wait for their tokens alone."""
        return True

    def cost(self, request: Request) -> DraftCost:
        """What a token has taken lately."""
        return DraftCost(0.0, self._token_s)

    def propose(self, wanted: Sequence[Wanted]) -> Sequence[Draft]:
        """Drafts of those whose last step the head has followed."""
        begin_s = time.perf_counter()
        with torch.inference_mode(), self._device.issuing():
            chains = self._chains(wanted)
        num_tokens = sum(len(chain.token_ids) for chain in chains if chain is not None)
        if num_tokens:
            token_s = (time.perf_counter() - begin_s) / num_tokens
            self._token_s = token_s if not self._token_s else _COST_KEPT * self._token_s + (1 - _COST_KEPT) * token_s
        return [
            NO_DRAFT if chain is None else Draft(chain.token_ids, chain.confidences, self.method) for chain in chains
        ]

    def verified(self, request: Request, draft: Draft, num_accepted: int) -> None:
        """Nothing is learned here."""

    def forget(self, request: Request) -> None:
        """Forget its hidden states."""
        self._slots.forget(request.key)

    def _chains(self, wanted: Sequence[Wanted]) -> list[_Chain | None]:
        states = self._states(wanted)
        chains = [
            None if state is None else _Chain(each, min(each.max_tokens, self._num_tokens))
            for each, state in zip(wanted, states, strict=True)
        ]
        going = [chain for chain in chains if chain is not None]
        if not going:
            return chains
        hidden = torch.cat([state for state in states if state is not None])
        self._guess(going, hidden)
        while rows := [row for row, chain in enumerate(going) if chain.goes_on]:
            if len(rows) < len(going):
                hidden = torch.cat([hidden[row : row + 1] for row in rows])
                going = [going[row] for row in rows]
            token_ids = np.array([chain.token_ids[-1] for chain in going], dtype=np.int64)
            shares = [chain.share for chain in going]
            self._blocks.writing(shares)
            hidden = self._pass.store(shares, token_ids, hidden)
            self._guess(going, hidden)
        return chains

    def _guess(self, chains: Sequence[_Chain], hidden: Tensor) -> None:
        """Add to each of `chains` the likeliest token behind its row of hidden [N, E]."""
        logits = self._head.logits(hidden).float()
        largest, rows = logits.max(dim=-1)
        chances = (largest - logits.logsumexp(dim=-1)).exp()
        token_ids, confidences = self._device.fetch((self._head.model_ids(rows), chances)).wait()
        for chain, token_id, confidence in zip(chains, token_ids.tolist(), confidences.tolist(), strict=True):
            chain.add(token_id, confidence if confidence == confidence else 0.0)

    def _states(self, wanted: Sequence[Wanted]) -> list[Tensor | None]:
        """The head's state [1, E] of the last slot of each whose newest token is known; None where it cannot be."""
        requests = [each.request for each in wanted]
        num_slots = [len(request.token_ids) - 1 for request in requests]
        states = [self._slots.state(each.key, count) for each, count in zip(requests, num_slots, strict=True)]
        found = [
            (number, rows)
            for number, (request, count) in enumerate(zip(requests, num_slots, strict=True))
            if states[number] is None and (rows := self._rows(request, count)) is not None
        ]
        if found:
            self._store([requests[number] for number, _ in found], [rows for _, rows in found])
            for number, _ in found:
                states[number] = self._slots.state(requests[number].key, num_slots[number])
        return states

    def _rows(self, request: Request, num_slots: int) -> SlotRows | None:
        """What can be stored for `request` in blocks of its own; None where that does not reach its last slot."""
        rows = self._slots.rows(request.key, num_slots)
        if rows is None:
            return None
        first = self._blocks.first_own(request.block_table, rows.first, num_slots)
        return None if first == num_slots else SlotRows(first, rows.streams[first - rows.first :])

    def _store(self, requests: Sequence[Request], rows: Sequence[SlotRows]) -> None:
        """Store the slots of requests whose hidden states wait."""
        shares, token_ids = [], []
        for request, (first, streams) in zip(requests, rows, strict=True):
            shares.append(SequenceShare(first, len(streams), request.block_table))
            token_ids += request.token_ids[first + 1 :]
        hidden = self._head.fused(torch.cat([each.streams for each in rows]))
        self._blocks.writing(shares)
        states = self._pass.store(shares, np.array(token_ids, dtype=np.int64), hidden)
        end = 0
        for request, share in zip(requests, shares, strict=True):
            end += share.num_tokens
            self._slots.stored(request.key, share.context_len, states[end - 1 : end])
