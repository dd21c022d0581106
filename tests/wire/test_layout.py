from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from baton.wire.errors import InvalidSetting, Refused
from baton.wire.layout import FP8_E4M3, LATENT, STATE, KvGroup, KvLayout, LayerKv

FULL, SLIDING = LayerKv(num_kv_heads=8, head_dim=128), LayerKv(num_kv_heads=4, head_dim=64, window=512)
LAYOUT = KvLayout.of_layers("bfloat16", 16, [FULL] * 24)
MIXED = KvLayout.of_layers("bfloat16", 16, [SLIDING, FULL, SLIDING])


def test_a_block_holds_keys_and_values_of_all_layers() -> None:
    assert LAYOUT.block_bytes == 24 * 2 * 8 * 128 * 16 * 2
    assert replace(LAYOUT, dtype="float32").block_bytes == 2 * LAYOUT.block_bytes


def test_layers_that_store_the_same_are_a_group() -> None:
    assert LAYOUT.groups == (KvGroup(tuple(range(24)), FULL),)
    assert MIXED.groups == (KvGroup((0, 2), SLIDING), KvGroup((1,), FULL))
    assert MIXED.layers == (SLIDING, FULL, SLIDING)
    assert (LAYOUT.num_layers, MIXED.num_layers) == (24, 3)


def test_layers_lie_in_the_order_of_the_model_whatever_their_group() -> None:
    sliding, full = 2 * 4 * 64 * 16 * 2, 2 * 8 * 128 * 16 * 2
    assert MIXED.layer_ends == (sliding, sliding + full, 2 * sliding + full)
    assert MIXED.layer_ends[-1] == MIXED.block_bytes
    assert LAYOUT.layer_ends == tuple(full * (layer + 1) for layer in range(24))


def test_a_state_takes_a_block_what_it_takes_whatever_the_blocks_size() -> None:
    state = LayerKv(num_kv_heads=2, head_dim=2048, kind=STATE)
    for block_size in (4, 64):
        layout = KvLayout.of_layers("bfloat16", block_size, [state, SLIDING, state])
        assert layout.layer_ends[0] == layout.block_bytes - layout.layer_ends[1] == 2 * 2048 * 2
        assert layout.has_states
    assert not MIXED.has_states


@pytest.mark.parametrize("kind", [LATENT, STATE])
def test_codes_are_for_keys_and_values(kind: str) -> None:
    with pytest.raises(InvalidSetting, match=f"KV in fp8_e4m3 is for keys and values: this model stores a {kind}"):
        KvLayout.of_layers(FP8_E4M3, 16, [FULL, LayerKv(1, 576, kind=kind)])


def test_equal_layouts_fit() -> None:
    LAYOUT.require_same(replace(LAYOUT), "node d")
    MIXED.require_same(replace(MIXED, groups=MIXED.groups[::-1]), "node d")


@pytest.mark.parametrize(
    ("other", "fact"),
    [
        (replace(MIXED, dtype="float32"), "dtype is bfloat16 here and float32"),
        (replace(MIXED, dtype=FP8_E4M3), "dtype is bfloat16 here and fp8_e4m3"),
        (replace(MIXED, block_size=32), "block_size is 16 here and 32"),
        (KvLayout.of_layers("bfloat16", 16, [SLIDING, FULL]), "num_layers is 3 here and 2"),
        (KvLayout.of_layers("bfloat16", 16, [SLIDING, SLIDING, FULL]), "num_kv_heads of layer 1 is 8 here and 4"),
        (
            KvLayout.of_layers("bfloat16", 16, [SLIDING, replace(FULL, head_dim=64), SLIDING]),
            "head_dim of layer 1 is 128 here and 64",
        ),
        (
            KvLayout.of_layers("bfloat16", 16, [SLIDING, FULL, replace(SLIDING, window=None)]),
            "window of layer 2 is 512 here and None",
        ),
    ],
)
def test_a_different_layout_is_refused_with_both_values(other: KvLayout, fact: str) -> None:
    with pytest.raises(Refused, match=f"{fact} at node d"):
        MIXED.require_same(other, "node d")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float8"}, "float8"),
        ({"groups": ()}, "every layer"),
        ({"groups": (KvGroup((1,), FULL),)}, "every layer"),
        ({"groups": (KvGroup((0, 0), FULL),)}, "every layer"),
        ({"groups": (KvGroup((0, 1), FULL), KvGroup((1,), SLIDING))}, "every layer"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSetting, match=message):
        replace(LAYOUT, **changes)


def test_an_unknown_kind_of_kv_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="'hologram' is not one of key_value"):
        replace(FULL, kind="hologram")
