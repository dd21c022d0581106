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
SOFT, PAPER, REFERENCE = "#7d8590", "#ffffff", "#b3261e"
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a6d3b", "#666a70", "#b7bcc3")

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
    """The figure on white, as an element of a page."""
    stream = io.StringIO()
    with styled():
        figure.savefig(stream, format="svg", dpi=110, metadata={"Date": None, "Creator": None})
    text = stream.getvalue()
    return re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
