from __future__ import annotations

from pathlib import Path

import pytest

from baton.bench.kv.measure import Case, Limits, Results
from baton.bench.kv.report import figures, save_plot, tables

MIB = 2**20
LIMITS = Limits(10**9, [0.1], [0.2], [0.05], [0.15], [0.25], [0.000125])


def case(num_blocks: int, memcpy_s: list[float], wall_s: list[float], bare_nixl_s: list[float] | None = None) -> Case:
    return Case("nixl", "xxh3", MIB, num_blocks, memcpy_s, wall_s, [2 * value for value in wall_s], bare_nixl_s or [])


STEADY = case(100, [0.01, 0.01, 0.01], [0.02, 0.025, 0.04], [0.02, 0.02, 0.02])
UNSTEADY = case(1, [0.001, 0.002, 0.003], [0.004, 0.004, 0.004])


def test_figures_are_of_medians_and_pairs() -> None:
    found = figures(STEADY)
    assert found.gb_per_s == pytest.approx(100 * MIB / 0.025 / 1e9)
    assert found.memcpy_gb_per_s == pytest.approx(100 * MIB / 0.01 / 1e9)
    assert found.kv_bw_ratio.of_medians == pytest.approx(0.4)
    assert (found.kv_bw_ratio.low, found.kv_bw_ratio.high) == pytest.approx((0.25, 0.5))
    assert found.kv_overhead_us == pytest.approx(15_000)
    assert found.let_go_p50_us == pytest.approx(50_000)
    assert found.bare_nixl_ratio is not None
    assert found.bare_nixl_ratio.of_medians == pytest.approx(0.8)


def test_there_is_a_table_for_everything_that_was_measured() -> None:
    found = tables(Results(LIMITS, [STEADY], [UNSTEADY], {}))
    assert [cell.text for cell in found[0].rows[0]][:4] == ["nixl", "xxh3", "100", "4.19"]
    assert [(table.name, len(table.rows)) for table in found] == [("kv-0", 1), ("kv-1", 1), ("kv-2", 1), ("kv-3", 5)]
    assert "takes 125 us" in found[-1].note
    assert [table.title for table in tables(Results(LIMITS, [], [], {}))] == ["Limits of this machine"]


def test_a_plot_is_a_png(tmp_path: Path) -> None:
    path = tmp_path / "kv.png"
    save_plot([STEADY, UNSTEADY], str(path), "caption")
    assert path.read_bytes().startswith(b"\x89PNG")
