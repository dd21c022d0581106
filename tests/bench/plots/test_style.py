from __future__ import annotations

from baton.bench.plots.style import as_png, as_svg, looks_of, new_figure, styled


def test_targets_look_different_and_keep_their_look() -> None:
    looks = looks_of(["a", "b", "c", "a"])
    assert len({look.color for look in looks.values()}) == len({look.marker for look in looks.values()}) == 3
    assert looks_of(["a", "b"])["b"] == looks["b"]


def test_the_same_figure_is_the_same_bytes() -> None:
    with styled():
        one, two = new_figure("title"), new_figure("title")
    assert as_svg(one) == as_svg(two)
    assert as_png(one) == as_png(two)
    assert as_png(one).startswith(b"\x89PNG")
