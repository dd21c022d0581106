"""A package as pip installs it, without pip: a module and its metadata in a folder that is searched for imports."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


def install(
    folder: Path, patch: pytest.MonkeyPatch, code: str, entry_points: dict[str, str], name: str = "acme"
) -> None:
    """Until the end of the test: a package `name` whose module has this code. `entry_points`: by group, a name and what
    of the module it stands for, as "granite = Store"; "granite = " is the module itself."""
    site = folder / f"site-{name}"
    metadata = site / f"{name}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (site / f"{name}.py").write_text(code)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"[{group}]\n{point.replace('= ', f'= {name}:').rstrip(':')}\n" for group, point in entry_points.items()]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    patch.syspath_prepend(site)
    patch.delitem(sys.modules, name, raising=False)
