from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from bench.limits.ceilings import Ceilings, buffer_bytes, last_cache_bytes

from bench.child import Child
from bench.limits.model_shapes import Product


class FakeChild:
    """Says how many seconds things take."""

    def __init__(self, answers: dict[str, float]) -> None:
        self._answers = answers

    def ask(self, command: str, **arguments: Any) -> float:
        assert command == "multiply" or arguments == {"num_passes": 8}
        return self._answers[command]


PRODUCTS = [Product("qkv", 512, 10, 20, 4), Product("head", 1, 10, 30, 1)]
CHILD = cast(Child, FakeChild({"copy": 0.8, "read": 0.4, "multiply": 0.001}))


def test_rates_are_work_over_seconds() -> None:
    ceilings = Ceilings(CHILD, 2 * 10**9, 1, PRODUCTS)
    assert ceilings.copy_gb_per_s() == pytest.approx(20)
    assert ceilings.read_gb_per_s() == pytest.approx(40)
    assert ceilings.gemm_gflop_per_s() == pytest.approx((2 * 512 * 10 * 20 * 4 + 2 * 10 * 30) / 0.001 / 1e9)


def test_a_ceiling_is_of_all_rounds_that_were_kept() -> None:
    ceilings = Ceilings(CHILD, 2**27, 2, PRODUCTS)
    ceilings.keep("read_stream", [10.0, 11.0])
    ceilings.keep("read_stream", [12.0])
    found = ceilings.found()
    assert [(ceiling.name, ceiling.value, ceiling.unit) for ceiling in found] == [("read_stream", 11.0, "GB/s")]
    assert "128 MiB" in found[0].note
    assert "2 thread(s)" in found[0].note


def test_the_largest_cache_counts(tmp_path: Path) -> None:
    for index, size in enumerate(("48K", "1024K", "65536K", "strange")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    assert last_cache_bytes(tmp_path) == 2**26
    assert last_cache_bytes(tmp_path / "nothing") == 0


def test_no_cache_holds_a_buffer() -> None:
    assert buffer_bytes(is_quick=False) >= max(2**27, min(4 * last_cache_bytes(), 2**31))
    assert buffer_bytes(is_quick=True) < 2**24
