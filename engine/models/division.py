"""Whether a model can be divided among ranks, by its config alone. Imports no torch.

Owns the answer before anything is started or allocated. The parts divide (`engine.models.parts`), and refuse by
themselves what is asked for here.
"""

from __future__ import annotations

from engine.models.config import ModelConfig
from engine.models.modelling.config import ModellingConfig
from engine.models.shard import Shard
from wire.errors import InvalidSetting, ModelLoadError

MAX_RANKS = 64


def require_number_of_ranks(num_ranks: int) -> None:
    """Raise `InvalidSetting` for a number of ranks that no machine has."""
    if not 1 <= num_ranks <= MAX_RANKS:
        raise InvalidSetting(f"--tensor-parallel-size must lie between 1 and {MAX_RANKS}, got {num_ranks}")


def require_divisible(config: ModelConfig | ModellingConfig, num_ranks: int) -> None:
    """Raise `ModelLoadError` with what cannot be divided among so many ranks."""
    if num_ranks == 1:
        return
    if isinstance(config, ModellingConfig):
        raise ModelLoadError(f"{config.architecture}, in transformers' modelling code, cannot be divided among ranks")
    if config.states is not None:
        raise ModelLoadError(f"the layers of {config.architecture} that keep a state cannot be divided among ranks")
    first = Shard(0, num_ranks)
    if config.qk_norm == "whole":
        raise ModelLoadError(f"{config.architecture} norms all heads together and cannot be divided among ranks")
    first.share_of(config.num_heads, "attention heads")
    if config.latent is None:
        first.kv_heads_of(config.num_kv_heads)
    experts = config.experts
    if experts is None or not all(experts.sparse_layers):
        first.share_of(config.intermediate_size, "rows of the MLP")
    if experts is not None:
        if experts.is_clamped:
            raise ModelLoadError(f"experts of {config.architecture} cannot be divided among ranks")
        first.share_of(experts.intermediate_size, "rows of an expert")
        first.share_of(experts.shared_size, "rows of the shared expert")
