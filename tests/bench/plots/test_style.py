from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

from baton.bench.plots.style import INK, PALETTE, as_png, as_svg, looks_of, new_figure, styled


def test_targets_look_different_and_keep_their_look() -> None:
    looks = looks_of(["a", "b", "c", "a"])
    assert len({look.color for look in looks.values()}) == len({look.marker for look in looks.values()}) == 3
    assert looks_of(["a", "b"])["b"] == looks["b"]


def test_more_targets_than_colours_still_differ() -> None:
    looks = looks_of([str(number) for number in range(16)])
    assert len({(look.color, look.marker) for look in looks.values()}) == 16


def test_an_svg_follows_the_readers_mode_and_names_nothing_outside() -> None:
    with styled():
        figure = new_figure("title")
        figure.subplots().plot([0, 1], [0, 1], color=PALETTE[0])
    shown = as_svg(figure)
    ElementTree.fromstring(shown)
    rules = shown[shown.index("<style>") : shown.index("</style>")]
    assert INK in rules
    assert "prefers-color-scheme:dark" in rules
    drawn = shown[shown.index("</style>") :]
    assert INK not in drawn
    assert PALETTE[0] not in drawn
    light, dark = rules.split("@media")
    used = set(re.findall(r"var\((--\w+)\)", drawn))
    assert len(used) >= 3
    for half in (light, dark):
        assert used <= set(re.findall(r"(--\w+):", half))
    assert not re.findall(r'href="(?!#|data:)', shown)


def test_the_same_figure_is_the_same_bytes() -> None:
    with styled():
        one, two = new_figure("title"), new_figure("title")
    assert as_svg(one) == as_svg(two)
    assert as_png(one) == as_png(two)
    assert as_png(one).startswith(b"\x89PNG")


def test_settings_of_matplotlib_are_left_alone() -> None:
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    with styled():
        as_png(new_figure("title"))
    assert dict(mpl.rcParams) == before
