"""A picture of a run: rate over size, a line for each transport, and the copies that they are held against."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.kv.measure import Case
from bench.kv.report import figures
from bench.plots.style import as_png
from bench.plots.transfer import Handoffs, draw
from wire.errors import InvalidSetting


def handoffs_of(case: Case) -> Handoffs:
    """What a picture shows of a case."""
    found = figures(case)
    return Handoffs(
        transport=case.transport,
        is_checked=case.checksum != "none",
        num_bytes=case.num_bytes,
        gb_per_s=found.gb_per_s,
        memcpy_gb_per_s=found.memcpy_gb_per_s,
        bare_gb_per_s=found.bare_nixl_gb_per_s,
    )


def save_plot(cases: Sequence[Case], path: str, caption: str) -> None:
    """Write a PNG. Raises `InvalidSetting` when that cannot be."""
    picture = as_png(draw([handoffs_of(case) for case in cases], caption))
    try:
        Path(path).write_bytes(picture)
    except OSError as error:
        raise InvalidSetting(f"--plot {path}: {error.strerror}") from None
