"""What one rank of a node holds of a model: bytes of weights, and the layout of its KV.

Owns nothing of its own: the parts that are served are constructed without memory and asked, so a plan cannot disagree
with what a node allocates. Where heads or rows do not divide among the ranks, they say so.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.engine.models.config import ModelConfig
from baton.engine.models.decoder import TORCH_DTYPES, Decoder
from baton.engine.models.division import require_divisible
from baton.engine.models.ops.torch_ops import TorchOps
from baton.engine.models.shard import Shard
from baton.wire.layout import KvLayout, LayerKv

_EXPERTS = ".experts."
_EMBEDDINGS = ("embedding", "positions")


@dataclass(frozen=True, slots=True)
class RankSize:
    """The bytes of one rank in one stage. `expert_bytes` of the `weights_bytes` are experts', of which a token needs a
    few. `table_bytes` are tables, of which a token needs a row. `draft_bytes` are a draft model's, whose KV is in the
    last `num_draft_layers` of the layout."""

    weights_bytes: int
    expert_bytes: int
    table_bytes: int
    layout: KvLayout
    draft_bytes: int = 0
    num_draft_layers: int = 0

    def with_draft(self, draft: RankSize) -> RankSize:
        """This rank, which computes drafts with a model of that size too."""
        layers, num_bytes = draft.layout.layers, draft.weights_bytes
        return RankSize(
            self.weights_bytes + num_bytes,
            self.expert_bytes,
            self.table_bytes,
            self.layout.followed_by(layers),
            num_bytes,
            len(layers),
        )

    @property
    def model_bytes(self) -> int:
        """The weights of the model itself."""
        return self.weights_bytes - self.draft_bytes

    @property
    def model_layers(self) -> tuple[LayerKv, ...]:
        """What layers of the model itself store."""
        return self.layout.layers[: self.layout.num_layers - self.num_draft_layers]


def stage_sizes(
    config: ModelConfig, dtype: str, kv_dtype: str, block_size: int, tensor_ranks: int, stages: int
) -> list[RankSize]:
    """A rank of each pipeline stage; all ranks of a stage hold as much.

    Raises `ModelLoadError` for what cannot be divided.
    """
    require_divisible(config, tensor_ranks, stages)
    shards = [Shard(0, tensor_ranks, stage, stages) for stage in range(stages)]
    return [
        _size(Decoder(config, TORCH_DTYPES[dtype], "meta", TorchOps(), shard), kv_dtype, block_size) for shard in shards
    ]


def _size(decoder: Decoder, kv_dtype: str, block_size: int) -> RankSize:
    parameters = list(decoder.parameters())
    layout = KvLayout.of_layers(kv_dtype, block_size, decoder.layer_kvs)
    experts = sum(parameter.num_gpu_bytes for parameter in parameters if _EXPERTS in parameter.name)
    tables = sum(parameter.num_gpu_bytes for parameter in parameters if parameter.name in _EMBEDDINGS)
    return RankSize(sum(parameter.num_gpu_bytes for parameter in parameters), experts, tables, layout)
