from __future__ import annotations

from baton.bench.kv.measure import Case
from baton.bench.kv.report import draw_transfer, table
from baton.bench.plots.style import as_png

MIB = 2**20


def case(num_blocks: int, memcpy_s: list[float], wall_s: list[float]) -> Case:
    return Case("nixl", "xxh3", MIB, num_blocks, memcpy_s, wall_s, [2 * value for value in wall_s])


STEADY = case(100, [0.01, 0.01, 0.01], [0.02, 0.025, 0.04])
UNSTEADY = case(1, [0.001, 0.002, 0.003], [0.004, 0.004, 0.004])


def test_every_case_is_a_row_of_medians_and_pairs_and_unsteady_copies_are_said() -> None:
    found = table([STEADY, UNSTEADY])
    rows = [dict(zip(found.heads, (cell.text for cell in row), strict=True)) for row in found.rows]
    assert list(rows[0].values()) == [
        *("nixl", "xxh3", "100", "4.19", "25.00", "39.70", "50.00"),
        *("10.49", "0.40", "0.25 - 0.50", "15000", ""),
    ]
    assert rows[1]["note"] == "noisy (80%)"


def test_there_is_a_line_for_each_way_and_one_for_copies() -> None:
    figure = draw_transfer([STEADY, UNSTEADY])
    assert [line.get_label() for line in figure.axes[0].get_lines()] == ["nixl, checksums", "copy (memcpy)"]
    assert as_png(figure).startswith(b"\x89PNG")
