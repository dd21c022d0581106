"""Logits that change before a token is chosen: which fields of a request change which, and how.

Owns the kinds of changes and their order: bias, penalties, withheld tokens (minimum length, bad words), allowed tokens.
A field that changes logits is read in `ChangeCollector.add`, on the host, and takes effect in `LogitChanges.apply`, on
the device. Knows no steps, and nothing of how a token is chosen then.

Letters: N rows (requests that sample in this step), C changed logits, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from baton.device.base import Array, Staging
from baton.device.staging import staged_bytes
from baton.engine.runner.sampled_rows import SampledRequest, position_of
from baton.engine.scheduler.request import PENDING_TOKEN

LARGEST_LOGIT = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class Changes:
    """Single logits that change. places: [C] int64 in the flattened logits; values: [C] float32, or none.

    They lie on the device once they are staged, or on the host where they found no room in the staging memory.
    """

    places: Tensor
    values: Tensor

    def staged(self, room: StagingRoom) -> Changes:
        """The same on the device, where there is room."""
        return Changes(room.put(self.places), room.put(self.values))


@dataclass(frozen=True, slots=True)
class LogitChanges:
    """Those of a step, each kind for all rows. `withheld`: tokens that are sampled only when nothing else is left.
    `allowed`: the tokens of some rows beside which no other is sampled; its values are the numbers of those rows."""

    bias: Changes | None
    repetition: Changes | None
    presence: Changes | None
    withheld: Changes | None
    allowed: Changes | None

    def staged(self, room: StagingRoom) -> LogitChanges:
        """The same on the device, where there is room."""
        kinds = (self.bias, self.repetition, self.presence, self.withheld, self.allowed)
        return LogitChanges(*(kind and kind.staged(room) for kind in kinds))

    def apply(self, logits: Tensor) -> None:
        """Change logits [N, V] in place, each kind for all rows at once."""
        flat = logits.view(-1)
        if self.bias is not None:
            _add(self.bias, flat)
        if self.repetition is not None:
            places, penalties = _on_device(self.repetition, flat)
            values = flat.index_select(0, places)
            flat.index_copy_(0, places, torch.where(values > 0, values / penalties, values * penalties))
        if self.presence is not None:
            _add(self.presence, flat)
        if self.withheld is not None:
            places, _ = _on_device(self.withheld, flat)
            values = flat.index_select(0, places)
            # NaN stays NaN: its row must not be taken for a valid one. Not -inf: where all allowed tokens are withheld,
            # one of them is sampled
            flat.index_copy_(0, places, values.masked_fill_(values.isnan().logical_not_(), -LARGEST_LOGIT))
        if self.allowed is not None:
            _allow_only(self.allowed, logits)


class StagingRoom:
    """Gives out `num_bytes` of staging memory until they are used up."""

    def __init__(self, staging: Staging, num_bytes: int) -> None:
        self._staging = staging
        self._num_bytes = num_bytes

    def put(self, values: Tensor) -> Tensor:
        """`values` on the device, or still on the host when they do not fit."""
        array: Array = values.numpy()
        num_bytes = staged_bytes(len(array), array.dtype.type)
        if num_bytes > self._num_bytes:
            return values
        self._num_bytes -= num_bytes
        return self._staging.put(array)


class ChangeCollector:
    """Collects the changes of a step row by row. `eos_token_ids` are withheld until a request's `min_tokens` are
    reached."""

    def __init__(self, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._eos_token_ids = eos_token_ids
        self._kinds = tuple(_ChangedRows(vocab_size) for _ in range(5))
        self._bias, self._repetition, self._presence, self.withheld, self._allowed = self._kinds

    @property
    def rows(self) -> set[int]:
        """The rows that have any."""
        return {row for kind in self._kinds for row in kind.rows}

    def add(self, row: int, request: SampledRequest) -> None:
        """What the fields of a request change in its row."""
        params = request.params
        if params.logit_bias_ids:
            self._bias.add(row, params.logit_bias_ids, params.logit_bias_values)
        if params.needs_history:
            _penalise(row, request, self._repetition, self._presence)
            _withhold_bad_words(row, request, self.withheld)
        if params.allowed_token_ids:
            self._allowed.add(row, params.allowed_token_ids, (row,))
        if params.min_tokens and position_of(request) < params.min_tokens:
            ends = [*params.stop_token_ids, *(() if params.ignore_eos else self._eos_token_ids)]
            self.withheld.add(row, ends, ())

    def joined(self) -> LogitChanges | None:
        """All of them, on the host; None when there are none."""
        joined = [kind.joined() for kind in self._kinds]
        return LogitChanges(*joined) if any(joined) else None


class _ChangedRows:
    """Changed logits of one kind, collected row by row."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.rows: list[int] = []
        self._places: list[Array] = []
        self._values: list[Array] = []

    def add(self, row: int, token_ids: Iterable[int], values: Iterable[float]) -> None:
        """The logits of `token_ids` in one row."""
        self.rows.append(row)
        self._places.append(np.fromiter(token_ids, np.int64) + row * self._vocab_size)
        self._values.append(np.fromiter(values, np.float64))

    def joined(self) -> Changes | None:
        """All of them, on the host; None when there are none."""
        if not self._places:
            return None
        values = np.concatenate(self._values).astype(np.float32)
        return Changes(torch.from_numpy(np.concatenate(self._places)), torch.from_numpy(values))


def _penalise(row: int, request: SampledRequest, repetition: _ChangedRows, presence: _ChangedRows) -> None:
    """Repetition (CTRL, arXiv:1909.05858) over prompt and output; presence and frequency over the output alone."""
    params = request.params
    if PENDING_TOKEN in request.token_ids[-1:]:
        raise ValueError(f"{request.key!r} has a penalty, and its last token is not known yet")
    if params.repetition_penalty != 1.0:
        seen = set(request.token_ids)
        repetition.add(row, seen, [params.repetition_penalty] * len(seen))
    counts = Counter(request.token_ids[request.prompt.num_tokens :])
    if counts and (params.presence_penalty or params.frequency_penalty):
        amounts = [-params.presence_penalty - params.frequency_penalty * count for count in counts.values()]
        presence.add(row, counts, amounts)


def _withhold_bad_words(row: int, request: SampledRequest, withheld: _ChangedRows) -> None:
    """The last token of each sequence whose other tokens are the end of the output."""
    output = request.token_ids[request.prompt.num_tokens :]
    ends = [
        last for *before, last in request.params.bad_word_ids if not before or list(output[-len(before) :]) == before
    ]
    if ends:
        withheld.add(row, ends, ())


def _allow_only(allowed: Changes, logits: Tensor) -> None:
    """Rule out all tokens of some rows but those at the places of `allowed`, whose values are the rows."""
    flat = logits.view(-1)
    places, rows = _on_device(allowed, flat)
    rows = rows.to(torch.int64)
    stays = flat.index_select(0, places)
    others = logits.index_select(0, rows)
    logits.index_copy_(0, rows, others.masked_fill_(others.isnan().logical_not_(), -torch.inf))
    flat.index_copy_(0, places, stays)


def _add(changes: Changes, flat: Tensor) -> None:
    places, values = _on_device(changes, flat)
    flat.index_add_(0, places, values)


def _on_device(changes: Changes, flat: Tensor) -> tuple[Tensor, Tensor]:
    """Places and values beside the logits; a copy only for those that found no room in the staging memory."""
    return changes.places.to(flat.device), changes.values.to(flat.device)
