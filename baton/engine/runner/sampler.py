"""The sampler: logits to tokens.

Owns the order of operations: bias, penalties, withheld tokens (minimum length, bad words), allowed tokens, grammars;
then greedy, or temperature, top-k, top-p, min-p and noise. Knows nothing between steps: noise is a function of (seed,
choice, position), so the same request sampled by another node, after a preemption or in another batch gets the same
noise.

A step is planned on the host (`baton.engine.runner.sampling_plan`), then sampled: `sample` issues operations over the
whole batch, and never asks a device that computes meanwhile for a value. Tokens of rows with a grammar are accepted, or
drawn again (`baton.engine.runner.redraws`). Logprobs are of the model's own distribution, before anything above changes
it.

Rows do not influence each other. Tokens with equal logits stand in the order of their ids, the weights that a row is
sampled from are not normalised, and a truncated row is the beginning of its sorted weights, summed once; so nothing
depends on how many tokens a neighbour looks at. On a GPU the order of a sum may vary with the number of rows: a token
then differs where its noise lies within a float64 rounding of a border.

On a CPU with kernels, logits come in the model's own dtype. Rows that are greedy, or drawn from all tokens, are read by
kernels, whatever their grammar; a row is made float32, for the operations here, where it needs any of them.

Rows are sampled in passes, whose float64 intermediates fit a cache on the host, and a fixed share of memory elsewhere.

Letters: N rows (requests that sample in this step), R rows of one pass, V vocabulary, K leading tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from baton.device.base import Array, Staging
from baton.engine.native.library import Kernels
from baton.engine.runner.drawing import INVERSE, Drawing
from baton.engine.runner.grammar_masks import Masks, apply_masks, are_allowed, row_masks
from baton.engine.runner.logit_changes import LARGEST_LOGIT
from baton.engine.runner.native_sampling import PlainSampling, argmax, draw
from baton.engine.runner.plain_rows import PlainRows
from baton.engine.runner.redraws import Redraw, redraw_of, refused_rows
from baton.engine.runner.sampled_rows import GrammarRow, SampledRequest
from baton.engine.runner.sampling_plan import (
    NARROW_WIDTH,
    SampleGroup,
    SamplingPlan,
    plan_sampling,
)
from baton.wire.sampling import MAX_TOP_LOGPROBS

_Values: TypeAlias = "Array | list[int]"
_HOST_PASS_ELEMENTS = 1 << 16
_DEVICE_PASS_ELEMENTS = 1 << 24
_LOW_32_BITS = 2**32 - 1


class Sampler:
    """Samples one token per row. `eos_token_ids` are withheld until a request's `min_tokens` are reached."""

    def __init__(
        self,
        eos_token_ids: frozenset[int],
        vocab_size: int,
        kernels: Kernels | None = None,
        drawing: Drawing = INVERSE,
    ) -> None:
        """`kernels`: of a CPU whose memory holds the logits. `drawing`: how rows that are not greedy are drawn."""
        self.vocab_size = vocab_size
        self._drawing = drawing
        self._kernels = kernels
        self._plain = None if kernels is None else PlainSampling(kernels)
        self._eos_token_ids = tuple(token_id for token_id in sorted(eos_token_ids) if token_id < vocab_size)

    def plan(self, requests: Sequence[SampledRequest], staging: Staging, max_num_rows: int = 0) -> SamplingPlan:
        """Stage what sampling needs of `requests`, one per row, with room for `max_num_rows` rows.

        The caller calls `stage_changes` of the plan before it uploads `staging` and samples.
        """
        return plan_sampling(
            requests,
            self._eos_token_ids,
            self.vocab_size,
            staging,
            max_num_rows,
            is_native=self._kernels is not None,
            draws_wide=not self._drawing.is_native,
        )

    def sample(self, plan: SamplingPlan, logits: Tensor, redraw: Redraw | None = None) -> tuple[Tensor, ...]:
        """logits: [N, V] float32, contiguous, changed in place; with kernels, of any dtype that they have. `redraw`: of
        the plan's rows with a grammar; None: their matchers are asked about the tokens, which are on the host then.
        Returns what `plan.tokens` needs once fetched:

        token ids [N] int64, each below V; whether a row held numbers alone and a token that may be sampled [N] bool;
        with logprobs, those of the chosen tokens of the P rows that report any [P] float32; with top logprobs, ids and
        logprobs [P, 20].
        """
        assert not plan.drawn, "these are sampled by `sample_plain`"
        is_wide = logits.dtype == torch.float32 or not plan.wide_rows
        wide = logits if is_wide else _widened(logits, plan.wide_rows)
        original = _log_probabilities(plan, wide) if plan.reports else None
        if plan.changes is not None:
            plan.changes.apply(wide)
        token_ids, is_valid = self._draw(logits, wide, plan.wide_rows, plan.groups)
        if redraw is not None:
            token_ids, is_valid = self._decide(plan, redraw, logits, wide, token_ids)
        elif plan.grammar_rows:
            self._keep_wide_to_grammars(plan, logits, wide, token_ids.numpy(), is_valid.numpy())
        outputs = [token_ids, is_valid]
        if original is not None:
            outputs += _report(plan, original, token_ids)
        return tuple(outputs)

    def sample_plain(self, plan: SamplingPlan, logits: Tensor) -> PlainRows | None:
        """What `sample` would return, on the host already; None where a row is wide, or where torch has to sample."""
        if self._plain is None or plan.wide_rows:
            return None
        token_ids, is_valid = self._plain(logits, plan.drawn)
        self.keep_to_grammars(plan.grammar_rows, logits, token_ids, is_valid)
        return PlainRows(token_ids, is_valid)

    def largest_rows(self, requests: Sequence[SampledRequest]) -> list[GrammarRow]:
        """The rows with a grammar of `requests`, all of which take the largest logit that is allowed."""
        rows = [(row, each.matcher, each.params) for row, each in enumerate(requests)]
        ends = self._eos_token_ids
        return [
            GrammarRow(row, matcher, (), ends if params.ignore_eos else ())
            for row, matcher, params in rows
            if matcher is not None
        ]

    def keep_to_grammars(
        self, rows: Sequence[GrammarRow], logits: Tensor, token_ids: list[int], is_valid: list[int]
    ) -> list[GrammarRow]:
        """Draw those of `token_ids` [N] again that a grammar of `rows` refuses, in place as `is_valid` [N], of plain
        rows on a host with kernels. These rows."""
        refused = refused_rows(rows, token_ids, is_valid)
        if refused:
            assert self._plain is not None
            drawn = [again for row in refused if (again := row.drawn_again) is not None]
            found = self._plain(logits, drawn, row_masks(refused, self.vocab_size))
            _replace(refused, found, token_ids, is_valid)
        return refused

    def _draw(
        self,
        logits: Tensor,
        wide: Tensor,
        wide_rows: Sequence[int],
        groups: Sequence[SampleGroup],
        masks: Masks | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Token ids and whether they are valid, see `sample`. What `masks` rule out may be -inf in `wide` then."""
        if self._kernels is None:
            if masks is not None:
                apply_masks(masks, wide)
            largest, token_ids = wide.max(dim=-1)
            for group in groups:
                _sample_group(group, wide, largest, token_ids, self._drawing)
            return token_ids, largest > -torch.inf
        found = argmax(self._kernels, logits, masks, wide, wide_rows)
        for group in groups:
            if group.width == 0 and self._drawing.is_native:
                draw(self._kernels, found, group)
            else:
                _sample_group(group, wide, found.values, found.token_ids, self._drawing)
        return found.token_ids, found.is_valid

    def _keep_wide_to_grammars(
        self, plan: SamplingPlan, logits: Tensor, wide: Tensor, token_ids: Array, is_valid: Array
    ) -> None:
        """As `keep_to_grammars`, of any rows."""
        refused = refused_rows(plan.grammar_rows, token_ids.tolist(), is_valid.tolist())
        if refused:
            redraw = redraw_of(refused, self.vocab_size)
            again, valid = self._draw(logits, wide, plan.wide_rows, redraw.groups, redraw.masks)
            _replace(refused, (again.numpy(), valid.numpy()), token_ids, is_valid)

    def _decide(
        self, plan: SamplingPlan, redraw: Redraw, logits: Tensor, wide: Tensor, token_ids: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`token_ids` [N] where they were tried and the masks of `redraw` allow them, what is drawn again elsewhere;
        and whether they are valid."""
        assert redraw.is_tried is not None
        again, valid = self._draw(logits, wide, plan.wide_rows, redraw.groups, redraw.masks)
        rows = redraw.masks.rows
        rows = torch.arange(redraw.masks.num_rows, device=token_ids.device) if rows is None else rows
        first = token_ids.index_select(0, rows)
        stays = are_allowed(redraw.masks, first).logical_and_(redraw.is_tried.to(torch.bool))
        token_ids.index_copy_(0, rows, torch.where(stays, first, again.index_select(0, rows)))
        return token_ids, valid


def _replace(rows: Sequence[GrammarRow], found: tuple[_Values, _Values], token_ids: _Values, is_valid: _Values) -> None:
    """Put what was `found` for these rows into `token_ids` and `is_valid`, each [N]. Their matchers, which are in the
    caches, read it at once."""
    for row, matcher, *_ in rows:
        token_ids[row], is_valid[row] = found[0][row], found[1][row]
        if is_valid[row]:
            matcher.accepts(int(token_ids[row]))


def _widened(logits: Tensor, rows: Sequence[int]) -> Tensor:
    """These rows of `logits` [N, V] in float32, at their places of as many rows. The others hold anything."""
    if len(rows) == len(logits):
        return logits.to(torch.float32)
    wide = torch.empty(logits.shape)
    for row in rows:
        wide[row].copy_(logits[row])
    return wide


def _log_probabilities(plan: SamplingPlan, logits: Tensor) -> Tensor:
    rows = plan.reported_rows
    return torch.log_softmax(logits if rows is None else logits.index_select(0, rows), dim=-1)


def _report(plan: SamplingPlan, original: Tensor, token_ids: Tensor) -> list[Tensor]:
    """Of `original` [P, V]. All rows get the largest number of top tokens: which of equal ones come first may depend on
    how many are asked for."""
    rows = plan.reported_rows
    chosen = token_ids if rows is None else token_ids.index_select(0, rows)
    outputs = [original.gather(1, chosen.unsqueeze(1)).squeeze(1)]
    if plan.reports_top:
        values, ids = torch.topk(original, min(MAX_TOP_LOGPROBS, original.shape[1]))
        outputs += [ids, values]
    return outputs


def _sample_group(group: SampleGroup, logits: Tensor, largest: Tensor, token_ids: Tensor, drawing: Drawing) -> None:
    """Sample for the rows of `group`, pass by pass, into `token_ids` [N]. largest: [N], the largest logits."""
    num_rows = group.rows.shape[0]
    elements = _HOST_PASS_ELEMENTS if logits.is_cpu else _DEVICE_PASS_ELEMENTS
    rows_per_pass = max(1, elements // logits.shape[1])
    for first in range(0, num_rows, rows_per_pass):
        last = min(first + rows_per_pass, num_rows)
        rows = group.rows[first:last]
        if group.first_row >= 0:
            values = logits[group.first_row + first : group.first_row + last]
        else:
            values = logits.index_select(0, rows)
        best = largest.index_select(0, rows).to(torch.float64).clamp_(max=LARGEST_LOGIT).unsqueeze(1)
        parameters = group.parameters[:, first:last].unsqueeze(2)
        if group.width == 0:
            sampled = _sample_unordered(values, best, parameters, drawing, has_min_p=group.has_min_p)
        else:
            top_k = group.top_k[first:last].unsqueeze(1)
            sampled = _sample_ordered(group, values, best, parameters, top_k, drawing)
        token_ids.index_copy_(0, rows, sampled)


def _sample_unordered(values: Tensor, best: Tensor, parameters: Tensor, drawing: Drawing, *, has_min_p: bool) -> Tensor:
    """Temperature, min-p (arXiv:2407.01082) and one token: [R] int64 of values [R, V]."""
    temperature, noise, _, min_p = parameters
    weights = _weights(values, best, temperature)
    if has_min_p:
        weights.masked_fill_(weights < min_p, 0.0)
    place = drawing.of_all(weights, noise)
    # a row of NaN finds no place, and its token is looked up in the embedding before the host sees the NaN
    return place.squeeze(1).clamp_(max=values.shape[1] - 1)


def _sample_ordered(
    group: SampleGroup, values: Tensor, best: Tensor, parameters: Tensor, top_k: Tensor, drawing: Drawing
) -> Tensor:
    """Temperature, top-k, top-p (arXiv:1904.09751), min-p and one token: [R] int64 of values [R, V].

    In this order all three keep the beginning of a row, so they come down to how many tokens are kept. top_k: [R, 1].
    """
    temperature, noise, top_p, min_p = parameters
    ordered, ids = _best_tokens(values, group.width)
    weights = _weights(ordered, best, temperature)
    kept = top_k
    if group.has_min_p:
        kept = torch.minimum(kept, (weights >= min_p).sum(dim=-1, keepdim=True))
    cumulative = weights.cumsum(-1)
    if group.has_top_p:
        nucleus = top_p * cumulative.gather(1, top_k - 1)
        # a token stays while the mass before it is below the limit
        kept = torch.minimum(kept, torch.searchsorted(cumulative, nucleus) + 1)
    last = (kept - 1).clamp_(min=0)
    return ids.gather(1, drawing.of_first(weights, cumulative, last, ids, noise)).squeeze(1)


def _weights(values: Tensor, best: Tensor, temperature: Tensor) -> Tensor:
    """Probabilities up to a factor, [R, K] float64, 1 for the most likely token. best, temperature: [R, 1]."""
    # the largest becomes 0 before the division: the smallest temperature and an overflowed penalty give no inf - inf
    finite = values.to(torch.float64).clamp_(max=LARGEST_LOGIT)
    return finite.sub_(best).div_(temperature).exp_()


def _best_tokens(values: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The `width` largest of each row [R, V] float32 with their ids, largest first, equal ones by id."""
    # + 0.0 turns -0.0 into 0.0, which it equals
    finite = values.clamp(max=LARGEST_LOGIT).add_(0.0)
    if width > NARROW_WIDTH:
        ordered, ids = torch.sort(finite, dim=-1, descending=True, stable=True)
        return ordered[:, :width], ids[:, :width]
    # topk takes any of equal ones: integers that order as the floats do, with the id below, are never equal
    bits = finite.view(torch.int32)
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64) << 32
    last_id = values.shape[1] - 1
    keys |= torch.arange(last_id, -1, -1, device=values.device)
    ids = last_id - (torch.topk(keys, width).values & _LOW_32_BITS)
    return finite.gather(1, ids), ids
