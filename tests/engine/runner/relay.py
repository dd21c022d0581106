"""A small relay for tests of the runner: a tiny decoder, an attention that can be recorded, and streams that advance.

`drive` does what a scheduler does, late or not: it launches steps over chosen streams and collects their tokens.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from baton.device.base import Device, Staging
from baton.engine.attention.base import LayerStored, PlannedShare
from baton.engine.models.config import load_config
from baton.engine.models.decoder import Decoder
from baton.engine.models.loading import load_weights
from baton.engine.runner.base import RunningStep
from baton.engine.runner.limits import RunnerLimits
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.runner.sampler import Sampler
from baton.engine.scheduler.request import PENDING_TOKEN, ScheduledRequest
from baton.engine.scheduler.step import SampledToken, SampledTokens, Step
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams
from tests.checkpoints import make_checkpoint
from tests.request_keys import key_of

BLOCK_SIZE = 4
MAX_BLOCKS = 8
NUM_BLOCKS = 64
SPARE_BLOCK = NUM_BLOCKS


class PagedAttention:
    """Every token attends to its sequence through block tables padded to `MAX_BLOCKS`: the same operations each step.

    kv: [B, L, 2, Hkv, block_size, D].
    """

    def __init__(self, kv: Tensor, *, is_recordable: bool = True) -> None:
        self.kv = kv
        self._is_recordable = is_recordable
        self._layer_stored: LayerStored | None = None

    def plan(self, shares: Sequence[PlannedShare], staging: Staging, layer_stored: LayerStored | None = None) -> None:
        """See `AttentionBackend.plan`."""
        self._layer_stored = layer_stored
        tables = np.full((len(shares), MAX_BLOCKS), shares[0].block_table[0], dtype=np.int64)
        for row, share in enumerate(shares):
            tables[row, : len(share.block_table)] = share.block_table
        positions = np.concatenate([np.arange(share.start, share.context_len) for share in shares])
        sequences = np.repeat(np.arange(len(shares)), [share.num_tokens for share in shares])
        self._tables = staging.put(tables.reshape(-1)).view(len(shares), MAX_BLOCKS)
        self._positions = staging.put(positions)
        self._sequences = staging.put(sequences)

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Attention.run`."""
        tables = self._tables.index_select(0, self._sequences)
        blocks = tables.gather(1, (self._positions // BLOCK_SIZE).unsqueeze(1)).squeeze(1)
        is_visible = torch.arange(MAX_BLOCKS * BLOCK_SIZE) <= self._positions.unsqueeze(1)
        keys = self._store(layer, 0, blocks, k)
        values = self._store(layer, 1, blocks, v)
        if self._layer_stored is not None:
            self._layer_stored()
        gathered = [self._gather(stored, tables, is_visible, q.shape[1]) for stored in (keys, values)]
        scores = torch.einsum("thd,tshd->ths", q, gathered[0]) / q.shape[2] ** 0.5
        weights = torch.softmax(scores.masked_fill(~is_visible.unsqueeze(1), -torch.inf), dim=-1)
        return torch.einsum("ths,tshd->thd", weights, gathered[1])

    def for_graph(self, num_sequences: int) -> PagedAttention | None:
        """See `AttentionBackend.for_graph`."""
        return PagedAttention(self.kv) if self._is_recordable else None

    def _store(self, layer: int, which: int, blocks: Tensor, values: Tensor) -> Tensor:
        stored = self.kv[:, layer, which].transpose(1, 2)
        stored.index_put_((blocks, self._positions % BLOCK_SIZE), values)
        return stored

    def _gather(self, stored: Tensor, tables: Tensor, is_visible: Tensor, num_heads: int) -> Tensor:
        rows = stored[tables].flatten(1, 2)
        rows = rows.masked_fill(~is_visible[:, :, None, None], 0.0)
        return rows.repeat_interleave(num_heads // rows.shape[2], dim=2)


def load_decoder(folder: Path) -> Decoder:
    """A decoder with random weights, 2 layers and 320 tokens, in one thread: others would wait for each other."""
    torch.set_num_threads(1)
    make_checkpoint(folder, "llama")
    decoder = Decoder(load_config(folder), torch.float32, "cpu")
    load_weights(folder, decoder)
    return decoder


def make_kv(decoder: Decoder) -> Tensor:
    """A KV tensor of `NUM_BLOCKS` blocks and the spare one."""
    config = decoder.config
    shape = (NUM_BLOCKS + 1, config.num_layers, 2, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    return torch.zeros(shape)


LIMITS = RunnerLimits(max_num_seqs=12, max_step_tokens=64, max_blocks_per_request=MAX_BLOCKS, spare_block=SPARE_BLOCK)


def make_runner(decoder: Decoder, device: Device, kv: Tensor, *, is_recordable: bool = True) -> ModelRunner:
    """A runner within `LIMITS`; without graphs until they are recorded."""
    sampler = Sampler(frozenset({319}), decoder.config.vocab_size)
    return ModelRunner(decoder, PagedAttention(kv, is_recordable=is_recordable), kv, sampler, device, LIMITS)


def scheduled(
    key: RequestKey,
    start: int,
    num_tokens: int,
    token_ids: Sequence[int],
    num_prompt_tokens: int,
    block_table: Sequence[int],
    params: DecodingParams,
) -> ScheduledRequest:
    """A share that samples when it reaches the last token."""
    is_due = start + num_tokens == len(token_ids)
    prompt = Prompt.of(token_ids[:num_prompt_tokens])
    return ScheduledRequest(key, start, num_tokens, token_ids, prompt, block_table, params, is_due)


@dataclass
class Stream:
    """One request and how far it is."""

    key: RequestKey
    token_ids: list[int]
    num_prompt_tokens: int
    params: DecodingParams
    block_table: list[int]
    num_computed: int = 0
    sampled: list[SampledToken] = field(default_factory=list)

    def share(self, max_tokens: int) -> ScheduledRequest:
        """All that is not computed yet, up to `max_tokens`."""
        count = min(len(self.token_ids) - self.num_computed, max_tokens)
        start, self.num_computed = self.num_computed, self.num_computed + count
        return scheduled(self.key, start, count, self.token_ids, self.num_prompt_tokens, self.block_table, self.params)


def make_streams(count: int, seed: int) -> list[Stream]:
    """Streams with blocks of their own and all kinds of sampling."""
    choose = random.Random(seed)
    blocks = choose.sample(range(NUM_BLOCKS), count * (NUM_BLOCKS // count))
    per_stream = min(MAX_BLOCKS, NUM_BLOCKS // count)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {},
        {"top_k": 5},
        {"top_p": 0.8, "logprobs": 2},
        {"min_p": 0.1},
    ]
    streams = []
    for index in range(count):
        prompt = [choose.randrange(300) for _ in range(choose.randint(1, 9))]
        table = blocks[index * per_stream : (index + 1) * per_stream]
        params = DecodingParams(seed=choose.randrange(1000), **choose.choice(kinds))
        streams.append(Stream(key_of(index), prompt, len(prompt), params, table))
    return streams


def choose_steps(count: int, num_steps: int, seed: int) -> list[list[int]]:
    """Which streams each step computes, in which order: all prompts first, then decodes of varying batches."""
    choose = random.Random(seed)
    steps = [[index] for index in range(count)] if choose.random() < 0.5 else [list(range(count))]
    return steps + [choose.sample(range(count), choose.randint(1, count)) for _ in range(num_steps)]


def drive(runner: ModelRunner, streams: Sequence[Stream], steps: Sequence[Sequence[int]], *, late: bool) -> None:
    """Compute `steps`; with `late`, each is launched before the tokens of the one before are known."""
    in_flight: tuple[RunningStep, list[tuple[Stream, int]]] | None = None
    for indexes in steps:
        chosen = [streams[index] for index in indexes]
        running = runner.launch(Step(tuple(stream.share(64 // len(chosen)) for stream in chosen)))
        due = [stream for stream in chosen if stream.num_computed == len(stream.token_ids)]
        places = [(stream, len(stream.token_ids)) for stream in due]
        for stream in due:
            stream.token_ids.append(PENDING_TOKEN)
        if in_flight is not None:
            collect(*in_flight)
        in_flight = running, places
        if not late:
            collect(*in_flight)
            in_flight = None
    if in_flight is not None:
        collect(*in_flight)


def collect(running: RunningStep, places: Sequence[tuple[Stream, int]]) -> None:
    """Put the tokens of a step where `PENDING_TOKEN` stands."""
    tokens: Mapping[RequestKey, SampledTokens] = running.result()
    assert tokens.keys() == {stream.key for stream, _ in places}
    for stream, place in places:
        assert stream.token_ids[place] == PENDING_TOKEN
        (token,) = tokens[stream.key]
        stream.token_ids[place] = token.token_id
        stream.sampled.append(token)
