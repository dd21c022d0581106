"""What one rank of a node holds of a model: bytes of weights, and the layout of its KV.

Owns nothing of its own: the parts that are served are constructed without memory and asked, so a plan cannot disagree
with what a node allocates. Where heads or rows do not divide among the ranks, they say so.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.models.config import ModelConfig
from engine.models.decoder import TORCH_DTYPES, Decoder
from engine.models.ops.torch_ops import TorchOps
from engine.models.parameters import Parameter
from engine.models.shard import Shard
from wire.errors import ModelLoadError
from wire.layout import KvLayout

_EXPERTS = ".experts."
_EMBEDDINGS = ("embedding", "positions")


@dataclass(frozen=True, slots=True)
class RankSize:
    """Of one rank in one stage. `expert_bytes` of the `weights_bytes` are experts', of which a token needs a few;
    `table_bytes` are tables, of which a token needs a row."""

    weights_bytes: int
    expert_bytes: int
    table_bytes: int
    layout: KvLayout


def stage_sizes(
    config: ModelConfig, dtype: str, kv_dtype: str, block_size: int, tensor_ranks: int, stages: int
) -> list[RankSize]:
    """A rank of each pipeline stage; all ranks of a stage hold as much.

    A stage has neighbouring layers; the first stages have one more where they do not divide. The first has the
    embedding too, the last norm and head. Raises `ModelLoadError` for what cannot be divided.
    """
    if stages > config.num_layers:
        raise ModelLoadError(f"{config.num_layers} layers cannot be divided among {stages} stages")
    decoder = Decoder(config, TORCH_DTYPES[dtype], "meta", TorchOps(), Shard(0, tensor_ranks))
    of_stage: list[list[Parameter]] = [[] for _ in range(stages)]
    for parameter in decoder.parameters():
        of_stage[_stage_of(parameter, config.num_layers, stages)].append(parameter)
    if stages > 1 and config.tie_word_embeddings:  # the head multiplies by the table, which is then needed twice
        of_stage[-1] += [parameter for parameter in of_stage[0] if parameter.name == _EMBEDDINGS[0]]
    kvs = decoder.layer_kvs
    found = []
    for stage, parameters in enumerate(of_stage):
        layers = [kv for layer, kv in enumerate(kvs) if _stage_of_layer(layer, config.num_layers, stages) == stage]
        found.append(_size(parameters, KvLayout.of_layers(kv_dtype, block_size, layers)))
    return found


def _size(parameters: list[Parameter], layout: KvLayout) -> RankSize:
    experts = sum(parameter.num_bytes for parameter in parameters if _EXPERTS in parameter.name)
    tables = sum(parameter.num_bytes for parameter in parameters if parameter.name in _EMBEDDINGS)
    return RankSize(sum(parameter.num_bytes for parameter in parameters), experts, tables, layout)


def _stage_of(parameter: Parameter, num_layers: int, stages: int) -> int:
    if parameter.name.startswith("layers."):
        return _stage_of_layer(int(parameter.name.split(".")[1]), num_layers, stages)
    return 0 if parameter.name in _EMBEDDINGS else stages - 1


def _stage_of_layer(layer: int, num_layers: int, stages: int) -> int:
    few, num_longer = divmod(num_layers, stages)
    in_longer = num_longer * (few + 1)
    return layer // (few + 1) if layer < in_longer else num_longer + (layer - in_longer) // few
