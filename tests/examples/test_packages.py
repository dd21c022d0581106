"""The example packages: the suites that they pass themselves, and that Baton finds them by the names they register."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from baton import LLM, SamplingParams
from baton.kvtransfer.transports.registry import load_plugged
from tests.examples.conftest import EXAMPLES

BACKEND, TRANSPORT = EXAMPLES / "custom_attention_backend", EXAMPLES / "custom_transport"
_GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def _module(folder: Path, name: str) -> Any:
    """A module of a package, which finds those beside it: in this process, and in those that it starts."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules.setdefault(name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


TestCounting = _module(BACKEND, "test_counting_attention").TestCounting
TestMemfd = _module(TRANSPORT, "test_memfd_transport").TestMemfd


def _installed(folder: Path, site: Path, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What pip writes of a package, until the end of the test; its project table."""
    project: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    metadata = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 1.0\n")
    groups = project["entry-points"].items()
    lines = [f"[{group}]\n{name} = {what}\n" for group, points in groups for name, what in points.items()]
    (metadata / "entry_points.txt").write_text("".join(lines))
    patch.syspath_prepend(site)
    return project


def test_the_backend_of_the_package_computes_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(BACKEND, tmp_path / "site", monkeypatch)
    settings: dict[str, Any] = {"num_threads": 1, "num_blocks": 64, "dtype": "float32"}
    counting, torch = (
        LLM(attention_backend=name, **settings).generate("Once upon a time", _GREEDY)[0]
        for name in ("counting", "torch")
    )
    assert counting.token_ids == torch.token_ids


def test_the_transport_of_the_package_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(TRANSPORT, tmp_path / "site", monkeypatch)
    found = load_plugged("memfd")
    assert found is not None
    assert found.name == "memfd"
