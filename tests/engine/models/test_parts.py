"""Parts of several ranks together compute what one rank computes alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.engine.models.config import ModelConfig, load_config
from baton.engine.models.decoder import Decoder
from baton.engine.models.loading import load_weights
from baton.engine.models.ops.torch_ops import TorchOps
from baton.engine.models.parts.base import PartSetup
from baton.engine.models.parts.linear import Linear, Matrix
from baton.engine.models.shard import Shard
from baton.wire.layout import LayerKv
from tests.checkpoints import make_checkpoint
from tests.engine.models.dense_attention import DenseAttention

NUM_IN, NUM_OUT = 12, 8


def setup_of(shard: Shard) -> PartSetup:
    return PartSetup(torch.float64, torch.device("cpu"), TorchOps(), shard)


def filled(linear: Linear, tensors: dict[str, Tensor]) -> Linear:
    """With what its sources take of `tensors`."""
    for parameter in linear.parameters():
        for source in parameter.sources:
            taken = tensors[source.name][tuple(slice(part.start, part.stop) for part in source.taken)]
            parameter.tensor[tuple(slice(part.start, part.stop) for part in source.region)] = taken
    return linear


def tensors_of(*names: str) -> dict[str, Tensor]:
    chance = torch.Generator().manual_seed(0)
    tensors = {}
    for name in names:
        tensors[f"{name}.weight"] = torch.randn(NUM_OUT, NUM_IN, generator=chance, dtype=torch.float64)
        tensors[f"{name}.bias"] = torch.randn(NUM_OUT, generator=chance, dtype=torch.float64)
    return tensors


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_outputs_of_column_parallel_ranks_stand_side_by_side(num_ranks: int) -> None:
    tensors, x = tensors_of("a", "b"), torch.randn(3, NUM_IN, dtype=torch.float64)
    found = []
    for rank in range(num_ranks):
        setup = setup_of(Shard(rank, num_ranks))
        matrices = [Matrix(name, NUM_OUT, setup.shard.share_of(NUM_OUT, "rows")) for name in "ab"]
        found.append(filled(Linear.column_parallel("ab", matrices, NUM_IN, True, setup), tensors)(x).chunk(2, dim=1))
    for name, outputs in zip("ab", zip(*found, strict=True), strict=True):
        expected = x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"]
        torch.testing.assert_close(torch.cat(outputs, dim=1), expected)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_outputs_of_row_parallel_ranks_add_up(num_ranks: int) -> None:
    tensors, x = tensors_of("a"), torch.randn(3, NUM_IN, dtype=torch.float64)
    total = torch.zeros(3, NUM_OUT, dtype=torch.float64)
    for rank in range(num_ranks):
        setup = setup_of(Shard(rank, num_ranks))
        columns = setup.shard.share_of(NUM_IN, "columns")
        linear = filled(Linear.row_parallel("a", "a", NUM_OUT, NUM_IN, columns, True, setup), tensors)
        total += linear(x[:, columns.start : columns.stop])
    torch.testing.assert_close(total, x @ tensors["a.weight"].T + tensors["a.bias"])


def one_layer(tmp_path: Path, shard: Shard) -> tuple[ModelConfig, Decoder]:
    """A decoder whose MLP adds nothing, so that what a rank adds to the residual stream is its attention's alone."""
    config = load_config(tmp_path)
    decoder = Decoder(config, torch.float32, "cpu", TorchOps(), shard)
    parameters = list(decoder.parameters())
    load_weights(tmp_path, decoder)
    for parameter in parameters:
        if ".down." in parameter.name:
            parameter.tensor.zero_()
    return config, decoder


@pytest.mark.parametrize(("num_ranks", "num_kv_heads"), [(2, 2), (4, 2), (4, 4)])
@torch.inference_mode()
def test_attention_of_all_ranks_adds_up(tmp_path: Path, num_ranks: int, num_kv_heads: int) -> None:
    changes = {"num_hidden_layers": 1, "num_key_value_heads": num_kv_heads}
    make_checkpoint(tmp_path, "qwen3", changes=changes)
    ids, positions = torch.arange(9), torch.arange(9)

    def added(shard: Shard) -> Tensor:
        config, decoder = one_layer(tmp_path, shard)
        return decoder.forward(ids, positions, DenseAttention([9], config.windows)) - decoder.embed(ids, positions)

    total = torch.stack([added(Shard(rank, num_ranks)) for rank in range(num_ranks)]).sum(0)
    torch.testing.assert_close(total, added(Shard()), rtol=1e-4, atol=1e-5)


def test_a_layer_says_what_it_stores_of_a_token(tmp_path: Path) -> None:
    changes = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
    config = load_config(make_checkpoint(tmp_path, "qwen2", changes=changes))
    whole, rank = (Decoder(config, torch.float32, "meta", TorchOps(), shard) for shard in (Shard(), Shard(1, 2)))
    assert whole.layer_kvs == (LayerKv(2, 16), LayerKv(2, 16, window=6))
    assert rank.layer_kvs == (LayerKv(1, 16), LayerKv(1, 16, window=6))
