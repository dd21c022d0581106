"""What is in the distribution, read from what would build it."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from tests.test_house import BATON, ROOMS

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS: dict[str, Any] = PROJECT["tool"]["setuptools"]
STAYS_HERE = ("baton/bench/results/*", "baton/bench/traces/.gitattributes")
"""Only a checkout needs these: measurements from which documentation is made."""
KERNELS = "baton/engine/native"
COMPILED = (f"{KERNELS}/src/*", f"{KERNELS}/_kernels.*")
"""The sources of the CPU kernels, which only a source distribution has, and what is compiled of them."""


def test_one_name_is_in_it_and_nothing_else() -> None:
    find = SETUPTOOLS["packages"]["find"]
    assert find == {"include": ["baton*"], "exclude": ["baton.demo.training*"]}
    beside = {path.name for path in ROOT.iterdir() if path.is_dir() and path.suffix != ".egg-info"}
    assert {folder for folder in beside if fnmatch(folder, "baton*")} == {"baton"}


def test_every_folder_of_modules_is_a_package() -> None:
    folders = {path.parent for room in ROOMS for path in (BATON / room).rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []


def files_beside_modules() -> Iterator[Path]:
    for room in ROOMS:
        for path in sorted((BATON / room).rglob("*")):
            if path.is_file() and path.suffix not in (".py", ".pyc"):
                yield path.relative_to(ROOT)


def is_packaged(path: Path) -> bool:
    """Whether a pattern of `package-data` matches: those of a package count from its folder."""
    patterns: dict[str, list[str]] = SETUPTOOLS["package-data"]
    return any(
        fnmatch(path.name, pattern) if package == "*" else fnmatch(str(path), f"{package.replace('.', '/')}/{pattern}")
        for package, globs in patterns.items()
        for pattern in globs
    )


def test_every_file_beside_the_modules_is_in_it() -> None:
    stays = {
        path
        for path in files_beside_modules()
        if any(fnmatch(str(path), pattern) for pattern in (*STAYS_HERE, *COMPILED))
    }
    assert [path for path in files_beside_modules() if path not in stays and not is_packaged(path)] == []


@pytest.mark.parametrize("command", PROJECT["project"]["scripts"].values())
def test_a_script_names_a_function_that_is_there(command: str) -> None:
    module, function = command.split(":")
    source = (ROOT / Path(*module.split("."))).with_suffix(".py").read_text()
    assert f"def {function}(" in source


def test_every_source_of_the_kernels_is_compiled_and_in_the_source_distribution() -> None:
    sources = {path for path in (ROOT / KERNELS / "src").rglob("*") if path.is_file()}
    (extension,) = SETUPTOOLS["ext-modules"]
    assert {ROOT / source for source in extension["sources"]} == {path for path in sources if path.suffix == ".cpp"}
    assert extension["optional"], "an install without a compiler must not fail"
    manifest = (ROOT / "MANIFEST.in").read_text().split()
    assert manifest[:2] == ["recursive-include", f"{KERNELS}/src"]
    assert {path for path in sources if not any(fnmatch(path.name, pattern) for pattern in manifest[2:])} == set()
