"""The plan of a step's sampling, made on the host and staged before the forward pass.

Owns the translation from requests to arrays: which operations sample which rows, each row's
parameters and noise; and, back, from fetched arrays to tokens. Has no state. `baton.engine.runner.sampler` computes.

Arrays with a few values a row come first in the staging memory and have a fixed room there: what is staged after them
lies where it lay in the step before. Lists of changed logits come last. What grammars need comes after the step, see
`baton.engine.runner.redraws`.

Lists (bias, penalties, withheld and allowed tokens) have no useful bound: a penalty names every token of a context.
They share `CHANGE_BYTES` of staging memory, as masks do `MASK_BYTES`. What finds no room there is copied slowly.

Letters: N rows (requests that sample in this step), R rows of one group, C changed logits, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from torch import Tensor

from baton.device.base import Array, Staging
from baton.device.staging import staged_bytes
from baton.engine.runner.logit_changes import ChangeCollector, LogitChanges, StagingRoom
from baton.engine.runner.plain_rows import plain_tokens
from baton.engine.runner.sampled_rows import (
    GrammarRow,
    SampledRequest,
    SampledRow,
    position_of,
    uniform_noise,
)
from baton.engine.scheduler.request import MaskSource
from baton.engine.scheduler.step import SampledToken
from baton.wire.messages.output import TokenLogprobs

CHANGE_BYTES = 4 * 2**20
"""Room in staging memory for the changed logits of a step, some 350,000 of them."""
MASK_BYTES = 4 * 2**20
"""Room for the masks of a step, of 220 rows with 150,000 tokens."""
NARROW_WIDTH = 1024
"""A row that needs at most this number of its best tokens in order is not sorted."""

_NO_INTEGERS, _NO_NUMBERS = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float64)


@dataclass(frozen=True, slots=True)
class SampleGroup:
    """R rows that are sampled by the same operations.

    `width`: the number of a row's best tokens that sampling looks at, in order; 0: all tokens, in the order of their
    ids. rows, top_k: [R] int64. `first_row` is the first of neighbouring rows, -1 when they are none. parameters: [4,
    R] float64: temperature, noise, top-p (infinite: off), min-p.
    """

    width: int
    rows: Tensor
    top_k: Tensor
    first_row: int
    parameters: Tensor
    has_top_p: bool
    has_min_p: bool


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """One step's sampling. Tensors are staged: valid in stream order from the upload to the next step's staging.

    `changes`: of logits, None: there are none. `grammar_rows`: those whose tokens a grammar has to
    accept; `groups` have those of them that are tried.
    reported_rows: [rows with logprobs] int64, None when all rows have them. `wide_rows`: those that need more than the
    largest of their masked logits, or one that is drawn from all of them. `drawn`: where kernels sample and no row is
    wide, those that are drawn, instead of `groups`.
    """

    num_rows: int
    wide_rows: Sequence[int]
    drawn: tuple[SampledRow, ...]
    changes: LogitChanges | None
    grammar_rows: tuple[GrammarRow, ...]
    groups: tuple[SampleGroup, ...]
    reported_rows: Tensor | None
    reports: tuple[tuple[int, int], ...]
    """(row, number of most likely tokens to report) of each row with logprobs."""

    def stage_changes(self, staging: Staging) -> SamplingPlan:
        """This plan with its changed logits staged."""
        if self.changes is None:
            return self
        return replace(self, changes=self.changes.staged(StagingRoom(staging, CHANGE_BYTES)))

    @property
    def reports_top(self) -> bool:
        """Whether a row reports more than its chosen token."""
        return any(num_top > 0 for _, num_top in self.reports)

    def tokens(self, arrays: Sequence[Array]) -> list[SampledToken | None]:
        """The sampled tokens, from the fetched outputs of `Sampler.sample`; None for a row that held NaN."""
        token_ids, is_number = arrays[0].tolist(), arrays[1].tolist()
        if not self.reports:
            return plain_tokens(token_ids, is_number)
        logprobs: list[TokenLogprobs | None] = [None] * self.num_rows
        chosen = arrays[2].tolist()
        top_ids, top_logprobs = (array.tolist() for array in arrays[3:]) if self.reports_top else ([], [])
        for place, (row, num_top) in enumerate(self.reports):
            ids = tuple(top_ids[place][:num_top]) if num_top else ()
            values = tuple(top_logprobs[place][:num_top]) if num_top else ()
            logprobs[row] = TokenLogprobs(chosen[place], ids, values)
        sampled = zip(token_ids, logprobs, is_number, strict=True)
        return [SampledToken(token_id, report) if valid else None for token_id, report, valid in sampled]


def sampling_bytes(max_num_rows: int) -> int:
    """Staging memory that `plan_sampling`, and drawing all of `max_num_rows` rows again, need at most."""
    first = staged_bytes(3 * max_num_rows, np.int64) + staged_bytes(4 * max_num_rows, np.float64)
    again = first + 2 * staged_bytes(max_num_rows, np.int64)
    return first + again + CHANGE_BYTES + MASK_BYTES


def plan_sampling(
    requests: Sequence[SampledRequest],
    eos_token_ids: tuple[int, ...],
    vocab_size: int,
    staging: Staging,
    max_num_rows: int = 0,
    *,
    is_native: bool = False,
    draws_wide: bool = False,
) -> SamplingPlan:
    """Stage what the rows of `requests` need, in this order, except changed logits: see `SamplingPlan.stage_changes`.

    Room is kept for `max_num_rows` rows. `is_native`: kernels on the host sample rows that are plain, and nothing needs
    to be staged for these. `draws_wide`: no row that is drawn is plain.
    """
    others = [(row, request) for row, request in enumerate(requests) if not request.takes_largest]
    if not others:
        stage_rows((), (), staging, max_num_rows)
        return _plan_of_largest(len(requests))
    changes = ChangeCollector(vocab_size, eos_token_ids)
    sampled: list[SampledRow] = []
    grammar_rows: list[GrammarRow] = []
    untried: set[int] = set()
    reports: list[tuple[int, int]] = []
    for row, request in others:
        params = request.params
        if params.logprobs is not None:
            reports.append((row, params.logprobs))
        changes.add(row, request)
        drawn = _sampled_row(row, request, vocab_size) if params.temperature != 0.0 else None
        if request.matcher is not None:
            in_grammar = _grammar_row(row, request, request.matcher, drawn, eos_token_ids, changes)
            grammar_rows.append(in_grammar)
            if not in_grammar.is_tried:
                untried.add(row)
        if drawn is not None:
            sampled.append(drawn)
    reported_rows = [row for row, _ in reports] if len(reports) < len(requests) else []  # all rows need no names
    first = [each for each in sampled if each.row not in untried] if untried else sampled
    wide_rows = _wide_rows(sampled, reports, changes, draws_wide=draws_wide)
    is_plain = is_native and not wide_rows
    groups, reported = stage_rows(() if is_plain else first, reported_rows, staging, max_num_rows)
    return SamplingPlan(
        num_rows=len(requests),
        wide_rows=wide_rows,
        drawn=tuple(first) if is_plain else (),
        changes=changes.joined(),
        grammar_rows=tuple(grammar_rows),
        groups=groups,
        reported_rows=reported,
        reports=tuple(reports),
    )


@cache
def _plan_of_largest(num_rows: int) -> SamplingPlan:
    """The plan of rows that all take the largest logit. There are no more of these than rows in a step."""
    return SamplingPlan(num_rows, (), (), None, (), (), None, ())


def _wide_rows(
    sampled: Sequence[SampledRow], reports: Sequence[tuple[int, int]], changes: ChangeCollector, *, draws_wide: bool
) -> list[int]:
    """The rows that need their logits changed or reported, ascending."""
    rows = {row.row for row in sampled if row.width or draws_wide}
    rows.update(row for row, _ in reports)
    rows.update(changes.rows)
    return sorted(rows)


def stage_rows(
    sampled: Sequence[SampledRow], reported_rows: Sequence[int], staging: Staging, max_num_rows: int
) -> tuple[tuple[SampleGroup, ...], Tensor | None]:
    """Stage the rows that are sampled, by groups, and those that report, where they are named. Room is kept for
    `max_num_rows` rows."""
    if not sampled and not reported_rows:
        staging.put(_NO_INTEGERS, 3 * max_num_rows)
        staging.put(_NO_NUMBERS, 4 * max_num_rows)
        return (), None
    unordered = [row for row in sampled if row.width == 0]
    narrow = [row for row in sampled if 0 < row.width <= NARROW_WIDTH]
    wide = [row for row in sampled if row.width > NARROW_WIDTH]
    rows, _, top_ks, *columns = (
        zip(*unordered, *narrow, *wide, strict=True) if sampled else [()] * len(SampledRow._fields)
    )
    integers = staging.put(np.array([*rows, *top_ks, *reported_rows], dtype=np.int64), 3 * max_num_rows)
    parameters = staging.put(np.array(columns, dtype=np.float64).reshape(-1), 4 * max_num_rows).view(4, -1)
    groups = _groups((unordered, narrow, wide), integers[: 2 * len(sampled)].view(2, -1), parameters)
    return groups, integers[2 * len(sampled) :] if reported_rows else None


def _sampled_row(row: int, request: SampledRequest, vocab_size: int) -> SampledRow:
    params = request.params
    top_k = params.top_k if 0 < params.top_k < vocab_size else vocab_size
    is_ordered = top_k < vocab_size or params.top_p < 1.0
    noise = uniform_noise(params.seed or 0, params.choice, position_of(request))
    top_p = params.top_p if params.top_p < 1.0 else math.inf
    return SampledRow(row, top_k if is_ordered else 0, top_k, params.temperature, noise, top_p, params.min_p)


def _grammar_row(
    row: int,
    request: SampledRequest,
    matcher: MaskSource,
    drawn: SampledRow | None,
    eos_token_ids: tuple[int, ...],
    changes: ChangeCollector,
) -> GrammarRow:
    """Where the grammar allows an end that is to be ignored, the output goes on if it can."""
    params = request.params
    allowed, ends = params.allowed_token_ids, eos_token_ids if params.ignore_eos else ()
    if ends and allowed:
        changes.withheld.add(row, ends, ())  # a mask does not know what else is left
        ends = ()
    return GrammarRow(row, matcher, allowed, ends, drawn, drawn is None or not drawn.is_truncated)


def _groups(groups: Sequence[Sequence[SampledRow]], integers: Tensor, parameters: Tensor) -> tuple[SampleGroup, ...]:
    """integers: [2, rows of all groups], parameters: [4, as many]."""
    found, first = [], 0
    for sampled in groups:
        if sampled:
            last = first + len(sampled)
            found.append(_group(sampled, integers[:, first:last], parameters[:, first:last]))
            first = last
    return tuple(found)


def _group(sampled: Sequence[SampledRow], integers: Tensor, parameters: Tensor) -> SampleGroup:
    first_row = sampled[0].row
    return SampleGroup(
        width=max(row.width for row in sampled),
        rows=integers[0],
        top_k=integers[1],
        first_row=first_row if sampled[-1].row - first_row == len(sampled) - 1 else -1,
        parameters=parameters,
        has_top_p=any(row.top_p < 1.0 for row in sampled),
        has_min_p=any(row.min_p > 0.0 for row in sampled),
    )
