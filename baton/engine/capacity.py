"""Capacity: how long a request and how large a step an engine takes, as far as it is known before memory is measured.

Owns these settings' checks and the rules behind their "0: choose for me". The size of the pool follows in
`baton.engine.pool_size`.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.engine.models.facts import ModelFacts
from baton.engine.settings import EngineSettings
from baton.wire.errors import InvalidSetting

_HOST_CHUNK = 512
_GPU_CHUNK = 2048
"""Long enough for full speed of the products, short enough that a prompt's first blocks travel while it computes."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """`max_model_len`: tokens of the longest request, which takes `blocks_per_request`. `max_chunk`: of prompts in a
    step. `max_step_tokens`: of the largest step."""

    max_model_len: int
    blocks_per_request: int
    max_chunk: int
    max_step_tokens: int


def find_capacity(settings: EngineSettings, config: ModelFacts, *, is_gpu: bool) -> Capacity:
    """Check the settings against the model. Raises `InvalidSetting`."""
    if settings.max_model_len == 1:
        raise InvalidSetting("--max-model-len 1 has no room: a prompt and an answer are a token each at least")
    limit = config.max_context_len
    if settings.max_model_len > limit:
        raise InvalidSetting(f"--max-model-len {settings.max_model_len} is above the model's limit of {limit} tokens")
    max_model_len = settings.max_model_len or limit
    max_chunk = settings.max_num_batched_tokens or (_GPU_CHUNK if is_gpu else _HOST_CHUNK)
    # where there is a chunk, one request at least does not decode
    max_step_tokens = max_chunk + settings.max_num_seqs - 1
    return Capacity(max_model_len, -(-max_model_len // settings.block_size), max_chunk, max_step_tokens)
