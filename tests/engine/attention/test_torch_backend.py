"""What only the torch backend does: any head size and type."""

from __future__ import annotations

import pytest
import torch

from baton.testing.attention import Relay, run_ragged_mix
from baton.wire.errors import InvalidSetting
from baton.wire.layout import LayerKv
from tests.engine.attention.backends import backend

TORCH = backend("torch")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("head_dim", [16, 64])
@pytest.mark.parametrize("group", [1, 2, 4])
def test_ragged_mixes_of_prompts_chunks_and_decodes_match_dense_attention(
    group: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    run_ragged_mix(Relay(TORCH, group=group, head_dim=head_dim, block_size=block_size, dtype=dtype))


@pytest.mark.parametrize("windows", [(1, None), (3, 4), (None, 7), (16, 100)])
def test_windows_are_exact_in_float32(windows: tuple[int | None, ...]) -> None:
    run_ragged_mix(Relay(TORCH, group=2, windows=windows))


@pytest.mark.parametrize("group", [1, 2])
def test_a_poisoned_pool_is_exact_in_float32(group: int) -> None:
    relay = Relay(TORCH, group=group)
    relay.kv.fill_(torch.nan)
    run_ragged_mix(relay)


def test_layers_whose_rows_lie_in_no_grid_are_refused() -> None:
    with pytest.raises(InvalidSetting, match="KV heads of 48 elements beside the other layers"):
        Relay(TORCH, layers=(LayerKv(2, 48), LayerKv(1, 16)))


def test_nothing_of_it_can_be_recorded() -> None:
    assert Relay(TORCH).attention.for_graph(4) is None
