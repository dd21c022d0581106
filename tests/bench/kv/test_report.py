from __future__ import annotations

import pytest

from baton.bench.kv.measure import Case
from baton.bench.kv.report import draw_transfer, figures, table
from baton.bench.plots.style import as_png

MIB = 2**20


def case(num_blocks: int, memcpy_s: list[float], wall_s: list[float]) -> Case:
    return Case("nixl", "xxh3", MIB, num_blocks, memcpy_s, wall_s, [2 * value for value in wall_s])


STEADY = case(100, [0.01, 0.01, 0.01], [0.02, 0.025, 0.04])
UNSTEADY = case(1, [0.001, 0.002, 0.003], [0.004, 0.004, 0.004])


def test_figures_are_of_medians_and_pairs() -> None:
    found = figures(STEADY)
    assert found.gb_per_s == pytest.approx(100 * MIB / 0.025 / 1e9)
    assert found.memcpy_gb_per_s == pytest.approx(100 * MIB / 0.01 / 1e9)
    assert found.kv_bw_ratio.of_medians == pytest.approx(0.4)
    assert (found.kv_bw_ratio.low, found.kv_bw_ratio.high) == pytest.approx((0.25, 0.5))
    assert found.kv_overhead_us == pytest.approx(15_000)
    assert found.let_go_p50_us == pytest.approx(50_000)


def test_every_case_is_a_row_and_unsteady_copies_are_said() -> None:
    rows = [[cell.text for cell in row] for row in table([STEADY, UNSTEADY]).rows]
    assert rows[0][:4] == ["nixl", "xxh3", "100", "4.19"]
    assert [row[-1] for row in rows] == ["", "noisy (80%)"]


def test_there_is_a_line_for_each_way_and_one_for_copies() -> None:
    figure = draw_transfer([STEADY, UNSTEADY])
    assert [line.get_label() for line in figure.axes[0].get_lines()] == ["nixl, checksums", "copy (memcpy)"]
    assert as_png(figure).startswith(b"\x89PNG")
