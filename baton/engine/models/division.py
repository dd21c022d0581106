"""Whether a model can be divided among ranks, by its config alone. Imports no torch.

Owns the answer before anything is started or allocated. The parts divide (`baton.engine.models.parts`), and refuse by
themselves what is asked for here.
"""

from __future__ import annotations

from baton.engine.models.config import ModelConfig
from baton.engine.models.expert_settings import MXFP4_GROUP
from baton.engine.models.modelling.config import ModellingConfig
from baton.engine.models.shard import Shard
from baton.engine.models.state_settings import ConvolutionSettings
from baton.wire.errors import InvalidSetting, ModelLoadError
from baton.wire.kv_shard import MAX_RANKS


def require_number_of_ranks(num_tensor: int, num_stages: int = 1) -> None:
    """Raise `InvalidSetting` for numbers of ranks in a stage, and of stages, that no machine has."""
    if num_tensor * num_stages > MAX_RANKS:
        raise InvalidSetting(
            f"--tensor-parallel-size {num_tensor} in {num_stages} stages are more than {MAX_RANKS} ranks"
        )


def require_divisible(config: ModelConfig | ModellingConfig, num_ranks: int, num_stages: int = 1) -> None:
    """Raise `ModelLoadError` with what cannot be divided among so many ranks in so many stages."""
    if num_ranks == num_stages == 1:
        return
    if isinstance(config, ModellingConfig):
        raise ModelLoadError(f"{config.architecture}, in transformers' modelling code, cannot be divided among ranks")
    first = Shard(0, num_ranks, 0, num_stages)
    first.layers_of(config.num_layers)
    if num_ranks == 1:
        return
    first.share_of(config.num_heads, "attention heads")
    if config.latent is None:
        first.kv_heads_of(config.num_kv_heads)
    if isinstance(config.states, ConvolutionSettings):
        first.share_of(config.hidden_size, "channels of a convolution")
    elif config.states is not None:
        first.share_of(config.states.num_key_heads, "key heads of a delta net")
    experts = config.experts
    if experts is None or not all(experts.sparse_layers):
        first.share_of(config.intermediate_size, "rows of the MLP")
    if experts is not None:
        share = first.share_of(experts.intermediate_size, "rows of an expert")
        if experts.is_mxfp4 and len(share) % MXFP4_GROUP:
            raise ModelLoadError(
                f"{experts.intermediate_size} rows of an expert cannot be divided among {num_ranks} ranks in groups of "
                f"{MXFP4_GROUP}, as MXFP4 has them"
            )
        first.share_of(experts.shared_size, "rows of the shared expert")
