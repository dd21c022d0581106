"""How every picture looks: one palette, one size; and how a figure becomes PNG or SVG.

The palette is Okabe and Ito's (https://jfly.uni-koeln.de/color/), which people with any kind of colour blindness can
tell apart; markers and dashes say the same again. A target keeps its look in all pictures of a file, because it comes
from its place among the file's targets. No figure knows of a screen: nothing here imports pyplot.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 10.0, 4.8
INK, SOFT, PAPER, REFERENCE = "#24292f", "#7d8590", "#ffffff", "#b3261e"
ON_COLOR = "#fffffe"
"""Text on a colour of the palette: not the paper, so that each has a dark counterpart of its own."""
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a6d3b", "#666a70", "#b7bcc3")

_LIGHT = (INK, SOFT, REFERENCE, ON_COLOR, *PALETTE)
_DARK = (
    *("#e6edf3", "#8d96a0", "#ff8a80", "#0b1016"),
    *("#4aa8e0", "#ff8a3d", "#35c79a", "#e39cc4", "#f2b632", "#8ccdf2", "#c9a86a", "#8b9097", "#c9ced4"),
)
"""What each of `_LIGHT` is on a dark page."""
_NUM_LOOKS = 8
_MARKERS = "osD^vPX*"
_DASHES: tuple[Any, ...] = ("-", "--", (0, (5, 1.5, 1, 1.5)), ":", "-", "--", "-.", ":")
_SETTINGS = Path(__file__).with_name("baton.mplstyle")


@dataclass(frozen=True, slots=True)
class Look:
    """Colour, marker and dashes of one target."""

    color: str
    marker: str
    dashes: Any


def looks_of(targets: Sequence[str]) -> Mapping[str, Look]:
    """The look of each target by its place; beyond the palette colours come again with other markers."""
    return {
        name: Look(
            PALETTE[place % _NUM_LOOKS],
            _MARKERS[(place + place // _NUM_LOOKS) % len(_MARKERS)],
            _DASHES[place % len(_DASHES)],
        )
        for place, name in enumerate(dict.fromkeys(targets))
    }


@contextmanager
def styled() -> Iterator[None]:
    """Everything made and saved inside has the common look; matplotlib's settings are as before after it."""
    import matplotlib as mpl

    with mpl.rc_context(fname=_SETTINGS):
        yield


def new_figure(title: str, height: float = HEIGHT) -> Figure:
    """An empty figure of the common width (in) with its title. To be called inside `styled`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), facecolor=PAPER)
    figure.suptitle(title, x=0.012, ha="left")
    return figure


def as_png(figure: Figure) -> bytes:
    """The figure on white, 150 dots per inch."""
    stream = io.BytesIO()
    with styled():
        figure.savefig(stream, format="png", dpi=150, metadata={"Software": None})
    return stream.getvalue()


def as_svg(figure: Figure) -> str:
    """The figure without a background; its colours follow the reader's light or dark mode."""
    stream = io.StringIO()
    with styled():
        figure.savefig(stream, format="svg", dpi=110, transparent=True, metadata={"Date": None, "Creator": None})
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    names = {color: f"--c{number}" for number, color in enumerate(_LIGHT)}
    text = re.sub("|".join(names), lambda found: f"var({names[found.group()]})", text)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    light, dark = (";".join(map("{}:{}".format, names.values(), colors)) for colors in (_LIGHT, _DARK))
    rules = f"<style>:root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}</style>"
    return re.sub(r"(<svg[^>]*>)", lambda found: found.group() + rules, text, count=1)
