"""A picture of a run: rate over size, a line for each transport, and the copies that they are held against."""

from __future__ import annotations

from collections.abc import Sequence

from bench.kv.measure import Case
from bench.kv.report import figures
from engine.api.errors import InvalidSetting

_COLORS = {"shm": "tab:blue", "zmq": "tab:orange", "nixl": "tab:green", "nccl": "tab:purple"}
_STYLES = {"xxh3": ("-", "o"), "none": ("--", "s")}


def save_plot(cases: Sequence[Case], path: str, caption: str) -> None:
    """Write a PNG. Raises `InvalidSetting` when that cannot be."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 5), layout="constrained")
    lines = list(dict.fromkeys((case.transport, case.checksum) for case in cases))
    for transport, checksum in lines:
        own = _by_size([case for case in cases if (case.transport, case.checksum) == (transport, checksum)])
        style, marker = _STYLES[checksum]
        label = f"{transport}, {'no checksums' if checksum == 'none' else checksum}"
        rates = [figures(case).gb_per_s for case in own]
        axes.plot(_sizes(own), rates, style, marker=marker, color=_COLORS[transport], label=label)
    # every line has a yardstick of its own, measured in turns with it: the band is between the slowest and the fastest
    sizes = sorted({case.num_bytes for case in cases})
    copies = [[figures(case).memcpy_gb_per_s for case in cases if case.num_bytes == size] for size in sizes]
    axes.fill_between(sizes, [min(rates) for rates in copies], [max(rates) for rates in copies], color="0.85")
    axes.plot(sizes, [sum(rates) / len(rates) for rates in copies], color="0.4", linewidth=2, label="memcpy")
    bare = _by_size([case for case in cases if case.bare_nixl_s and case.checksum == cases[0].checksum])
    if bare:
        rates = [figures(case).bare_nixl_gb_per_s or 0.0 for case in bare]
        axes.plot(_sizes(bare), rates, ":", marker="x", color=_COLORS["nixl"], label="bare NIXL write")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [_size_label(size) for size in sizes])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("KV of one handoff")
    axes.set_ylabel("GB/s, until the decode node has delivered it")
    axes.set_title("Rate of KV handoffs between two processes")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize="small")
    figure.text(0.99, 0.005, caption, ha="right", va="bottom", fontsize=6, color="0.4")
    try:
        figure.savefig(path, dpi=150, format="png")
    except OSError as error:
        raise InvalidSetting(f"--plot {path}: {error.strerror}") from None
    finally:
        pyplot.close(figure)


def _by_size(cases: Sequence[Case]) -> list[Case]:
    return sorted(cases, key=lambda case: case.num_bytes)


def _sizes(cases: Sequence[Case]) -> list[int]:
    return [case.num_bytes for case in cases]


def _size_label(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:g} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:g} KiB"
