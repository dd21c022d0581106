from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.facts import Facts
from bench.kv.measure import Case, Limits, Results
from bench.kv.report import as_json, figures, report, save_plot
from wire.errors import InvalidSetting

MIB = 2**20
FACTS = Facts("2026-01-01 00:00 UTC", "baton bench kv", "abc", "A CPU", 2, (0, 1), 2**30, "Linux 6", 0.5, {})
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


def test_an_unsteady_yardstick_is_said_beside_the_figure() -> None:
    assert not figures(STEADY).is_noisy
    shown = report(FACTS, Results(LIMITS, [STEADY, UNSTEADY], [], {}), {}, as_markdown=False).splitlines()
    lines = [line for line in shown if line.startswith("| nixl ")]
    assert ["noisy (80%)" in line for line in lines] == [False, True]


def test_tables_are_whole_and_their_titles_are_markdown_where_that_is_wanted() -> None:
    shown = report(FACTS, Results(LIMITS, [STEADY], [UNSTEADY], {}), {}, as_markdown=True)
    rows = [line for line in shown.splitlines() if line.startswith("|")]
    assert "| nixl      | xxh3     |    100 | 4.19 |" in shown
    assert len(rows) == 3 + 3 + 3 + 7
    assert all(row.endswith("|") for row in rows)
    assert "**Limits of this machine**\n\n|" in shown


def test_what_was_not_measured_is_said() -> None:
    shown = report(FACTS, Results(LIMITS, [], [], {"shm, xxh3": "it broke"}), {"nccl": "no torch"}, as_markdown=False)
    assert "nccl was not measured: no torch" in shown
    assert "shm, xxh3 failed: it broke" in shown


def test_json_has_every_sample() -> None:
    found = json.loads(json.dumps(as_json(FACTS, Results(LIMITS, [STEADY], [], {}), {})))
    assert found["cases"][0]["wall_s"] == STEADY.wall_s
    assert found["cases"][0]["figures"]["gb_per_s"] == figures(STEADY).gb_per_s
    assert found["facts"]["command"] == FACTS.command


def test_a_plot_is_a_png(tmp_path: Path) -> None:
    path = tmp_path / "kv.png"
    save_plot([STEADY, UNSTEADY], str(path), "caption")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_plot_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="--plot"):
        save_plot([STEADY], str(tmp_path / "missing" / "kv.png"), "caption")
