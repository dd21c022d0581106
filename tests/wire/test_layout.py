from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from wire.errors import InvalidSetting, Refused
from wire.layout import KvLayout

LAYOUT = KvLayout("bfloat16", num_layers=24, num_kv_heads=8, head_dim=128, block_size=16)


def test_a_block_holds_keys_and_values_of_all_layers() -> None:
    assert LAYOUT.block_bytes == 24 * 2 * 8 * 128 * 16 * 2
    assert replace(LAYOUT, dtype="float32").block_bytes == 2 * LAYOUT.block_bytes


def test_equal_layouts_fit() -> None:
    LAYOUT.require_same(replace(LAYOUT), "node d")


@pytest.mark.parametrize(
    ("name", "value"),
    [("dtype", "float32"), ("num_layers", 3), ("num_kv_heads", 2), ("head_dim", 64), ("block_size", 32)],
)
def test_a_different_layout_is_refused_with_both_values(name: str, value: Any) -> None:
    with pytest.raises(Refused, match=f"{name} is {getattr(LAYOUT, name)} here and {value} at node d"):
        LAYOUT.require_same(replace(LAYOUT, **{name: value}), "node d")


def test_a_dtype_without_a_size_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="float8"):
        replace(LAYOUT, dtype="float8")
