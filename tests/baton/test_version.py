"""The version has one source, `pyproject.toml`; every other file that names one agrees."""

from __future__ import annotations

import re
from pathlib import Path

from tests.baton.test_distribution import PROJECT, ROOT

VERSION: str = PROJECT["project"]["version"]
_NAMED = re.compile(r"(?:baton-(?:cpu|cuda):|newTag: |baton-serve==)(\d+\.\d+\.\d+)")
FOLDERS = ("deploy", "examples", "docs/operations")


def _named() -> dict[Path, set[str]]:
    files = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file())
    found = {path: set(_NAMED.findall(path.read_text(errors="ignore"))) for path in files}
    return {path.relative_to(ROOT): versions for path, versions in found.items() if versions}


def test_images_manifests_and_examples_are_of_this_version() -> None:
    named = _named()
    assert len(named) >= 8
    assert {str(path): versions for path, versions in named.items() if versions != {VERSION}} == {}


def test_the_policy_names_the_version_that_gets_fixes() -> None:
    supported = re.findall(r"^\| (\S+) \| yes \|$", (ROOT / "SECURITY.md").read_text(), re.M)
    assert supported == [VERSION.rpartition(".")[0]]
