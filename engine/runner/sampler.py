"""The sampler: logits to tokens.

Owns the order of operations: bias, penalties, minimum length; then greedy, or temperature, top-k, top-p, min-p and one
draw. Knows nothing between steps: noise is a function of (seed, choice, position), so the same request drawn by another
node, after a preemption or in another batch gets the same noise.

Logprobs are of the model's own distribution, before anything above changes it.

Letters: N rows (requests that sample in this step), V vocabulary.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from engine.api.messages import TokenLogprobs
from engine.api.sampling import DecodingParams
from engine.scheduler.request import SampledToken, ScheduledRequest

_NOISE_KEY = struct.Struct("<qqq")
_LARGEST_LOGIT = torch.finfo(torch.float32).max


class Sampler:
    """Draws one token per row. `eos_token_ids` are withheld until a request's `min_tokens` are reached."""

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self._eos_token_ids = sorted(eos_token_ids)

    def sample(self, logits: Tensor, requests: Sequence[ScheduledRequest]) -> list[SampledToken | None]:
        """logits: [N, V] float32, changed in place; one request per row. None for a row that holds NaN."""
        wanted = [row for row, request in enumerate(requests) if request.params.logprobs is not None]
        original = torch.log_softmax(logits[wanted], dim=-1) if wanted else logits[:0]
        for row, request in enumerate(requests):
            self._adjust(logits[row], request)
        largest, best = logits.max(dim=-1)
        token_ids, is_number = best.tolist(), (~largest.isnan()).tolist()
        for row, request in enumerate(requests):
            if is_number[row] and not request.params.is_greedy:
                token_ids[row] = _draw(logits[row], request)
        logprobs: list[TokenLogprobs | None] = [None] * len(requests)
        for place, row in enumerate(wanted):
            logprobs[row] = _report(original[place], token_ids[row], requests[row].params.logprobs or 0)
        drawn = zip(token_ids, logprobs, is_number, strict=True)
        return [SampledToken(token_id, report) if valid else None for token_id, report, valid in drawn]

    def _adjust(self, logits: Tensor, request: ScheduledRequest) -> None:
        """Bias, penalties and minimum length, in place on one row [V]."""
        params = request.params
        if params.logit_bias_ids:
            bias = torch.tensor(params.logit_bias_values, dtype=logits.dtype, device=logits.device)
            logits.index_add_(0, _ids(params.logit_bias_ids, logits), bias)
        if _has_penalties(params):
            _penalise(logits, request)
        num_output = len(request.token_ids) - request.num_prompt_tokens
        if num_output < params.min_tokens:
            withheld = [*params.stop_token_ids, *(() if params.ignore_eos else self._eos_token_ids)]
            logits.index_fill_(0, _ids(withheld, logits), -torch.inf)


def uniform_noise(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing but its arguments; all are signed 64-bit."""
    digest = blake2b(_NOISE_KEY.pack(seed, choice, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


def _has_penalties(params: DecodingParams) -> bool:
    return bool(params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty)


def _penalise(logits: Tensor, request: ScheduledRequest) -> None:
    """Repetition (CTRL, arXiv:1909.05858) over prompt and output; presence and frequency over the output alone."""
    params = request.params
    if params.repetition_penalty != 1.0:
        seen = _ids(sorted(set(request.token_ids)), logits)
        values = logits.index_select(0, seen)
        penalty = params.repetition_penalty
        logits.index_copy_(0, seen, torch.where(values > 0, values / penalty, values * penalty))
    counts = Counter(request.token_ids[request.num_prompt_tokens :])
    if counts and (params.presence_penalty or params.frequency_penalty):
        amounts = [-params.presence_penalty - params.frequency_penalty * count for count in counts.values()]
        change = torch.tensor(amounts, dtype=logits.dtype, device=logits.device)
        logits.index_add_(0, _ids(list(counts), logits), change)


def _draw(logits: Tensor, request: ScheduledRequest) -> int:
    """Temperature, top-k, top-p (arXiv:1904.09751), min-p (arXiv:2407.01082), then one draw by inverse CDF."""
    params = request.params
    # the largest becomes 0 before the division: the smallest temperature and an overflowed penalty give no inf - inf
    finite = logits.to(torch.float64).clamp_(max=_LARGEST_LOGIT)
    scaled = (finite - finite.max()) / params.temperature
    order: Tensor | None = None
    if 0 < params.top_k < scaled.numel():
        scaled, order = torch.topk(scaled, params.top_k)
    elif params.top_p < 1.0:
        scaled, order = torch.sort(scaled, descending=True, stable=True)
    probabilities = torch.softmax(scaled, dim=-1)
    if params.top_p < 1.0:
        mass_before = torch.cumsum(probabilities, dim=-1) - probabilities
        probabilities = probabilities.masked_fill(mass_before >= params.top_p, 0.0)
    if params.min_p > 0.0:
        probabilities = probabilities.masked_fill(probabilities < params.min_p * probabilities.max(), 0.0)
    cumulative = torch.cumsum(probabilities, dim=-1)
    position = len(request.token_ids) - request.num_prompt_tokens
    threshold = uniform_noise(params.seed or 0, params.choice, position) * float(cumulative[-1])
    place = int(torch.searchsorted(cumulative, threshold, right=True))
    return int(order[place]) if order is not None else place


def _report(log_probabilities: Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    """log_probabilities: [V]."""
    chosen = float(log_probabilities[token_id])
    if num_top == 0:
        return TokenLogprobs(chosen, (), ())
    values, ids = torch.topk(log_probabilities, min(num_top, log_probabilities.numel()))
    return TokenLogprobs(chosen, tuple(ids.tolist()), tuple(values.tolist()))


def _ids(token_ids: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(token_ids, dtype=torch.int64, device=like.device)
