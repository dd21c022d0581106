from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from baton.bench.documents import CompareDocument, load_result
from baton.bench.numbers import percentile
from baton.bench.plots.lines import Plot, attainment, gaps
from baton.bench.runs import Point, points_of
from tests.bench.report.samples import COMPARISON, RESULTS

DOCUMENT = load_result(RESULTS / f"{COMPARISON}.json").document
assert isinstance(DOCUMENT, CompareDocument)
POINTS = points_of(DOCUMENT.runs)
TARGETS = ("baton-pd", "baton-colocated", "vllm-pd")
RATES = (1.0, 2.0, 4.0, 6.0)


def axes_of(figure: Figure) -> list[Any]:
    return list(figure.axes)


def drawn(plot: Plot | None) -> Figure:
    assert plot is not None
    return plot.draw()


def lines_of(axes: Any) -> dict[str, Any]:
    return {line.get_label(): line for line in axes.get_lines()}


def texts_of(figure: Figure) -> str:
    legends = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    return " ".join([figure.get_suptitle(), *legends])


def point(target: str, rate: float) -> Point:
    return next(point for point in POINTS if (point.target, point.rate) == (target, rate))


def test_attainment_has_a_line_for_each_target_and_the_goal() -> None:
    figure = drawn(attainment(POINTS, {"ttft": 500.0, "tpot": 50.0}))
    (axes,) = axes_of(figure)
    lines = lines_of(axes)
    for target in TARGETS:
        shown = [point(target, rate).middle("slo_attainment") for rate in RATES]
        assert list(lines[target].get_ydata()) == shown
    assert list(lines["90 %: goodput"].get_ydata()) == [0.9, 0.9]
    assert axes.get_ylim()[0] == 0
    assert axes.get_ylim()[1] >= 1
    assert "TTFT ≤ 500 ms, TPOT ≤ 50 ms" in texts_of(figure)


def test_gaps_are_shown_by_how_many_nines_are_shorter() -> None:
    figure = drawn(gaps(POINTS, 60.0))
    titles = [axes.get_title(loc="left") for axes in axes_of(figure)]
    assert titles == ["1 request/s", "2 requests/s", "4 requests/s", "6 requests/s"]
    lines = lines_of(axes_of(figure)[2])
    own = [gap * 1e3 for run in point("baton-pd", 4.0).runs for request in run.row("itls") for gap in request]
    shown_ms = np.interp([0.30103, 1, 2], lines["baton-pd"].get_ydata(), lines["baton-pd"].get_xdata())
    assert shown_ms == pytest.approx([percentile(own, share) for share in (50, 90, 99)], rel=0.01)
    assert list(lines["SLO: 60 ms"].get_xdata()) == [60, 60]
