"""Names that installed packages add, and packages that are of no use."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pytest

from baton.runtime import plugins
from baton.runtime.settings import resolve, setting
from baton.wire.errors import InvalidSetting, TransferFailed
from tests.installed_package import install

GROUP = "baton.kv_stores"


@dataclass(frozen=True, slots=True)
class Settings:
    """With one choice that is open to packages, and one that is not."""

    store: str = setting("host", "where", choices=("host", "none"), plugins=GROUP)
    closed: str = setting("a", "which", choices=("a", "b"))


class Shelf(Protocol):
    """A contract."""

    depth: int

    def put(self) -> None:
        """Do it."""
        ...


def load(name: str) -> plugins.Plugin:
    return plugins.load(GROUP, "--store", name, ("host",))


def resolved(**flags: str) -> Settings:
    return resolve(Settings, argparse.Namespace(config=None, **flags), {})


def test_a_setting_takes_the_names_of_packages_without_importing_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "raise RuntimeError", {GROUP: "granite = Store", "baton.others": "basalt = Store"})
    assert resolved(store="granite").store == "granite"
    with pytest.raises(InvalidSetting, match=r"^--store: 'slate' is not one of host, none, granite$"):
        resolved(store="slate")
    with pytest.raises(InvalidSetting, match=r"^--store: 'basalt' is not one of host, none, granite$"):
        resolved(store="basalt")
    with pytest.raises(InvalidSetting, match=r"^--closed: 'granite' is not one of a, b$"):
        resolved(closed="granite")
    assert "acme" not in sys.modules


def test_a_name_is_loaded_when_it_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "Store = 'what it stands for'", {GROUP: "granite = Store"})
    assert load("granite").value == "what it stands for"


def test_a_name_nobody_has_is_refused_with_those_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "", {GROUP: "granite = Store"})
    with pytest.raises(InvalidSetting, match=r"^--store 'slate' is not one of host, granite$"):
        load("slate")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise RuntimeError('first\\nsecond')", "RuntimeError: first second"),
        ("Shop = 1", "AttributeError: module 'acme' has no attribute 'Store'"),
    ],
)
def test_a_package_that_cannot_be_imported_is_named_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, reason: str
) -> None:
    install(tmp_path, monkeypatch, code, {GROUP: "granite = Store"})
    with pytest.raises(InvalidSetting) as caught:
        load("granite")
    assert str(caught.value) == f"--store granite of the package acme cannot be imported: {reason}"


def test_one_name_of_two_packages_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "", {GROUP: "granite = Store"})
    install(tmp_path, monkeypatch, "", {GROUP: "granite = Store"}, name="bolt")
    with pytest.raises(
        InvalidSetting, match=r"^--store granite: the packages acme and bolt all have one of that name$"
    ):
        load("granite")


def test_what_a_contract_asks_for_is_looked_at_once_it_is_made() -> None:
    found = plugins.Plugin("--store granite of the package acme", None)
    with pytest.raises(
        InvalidSetting, match=r"^--store granite of the package acme is no Shelf: it has no depth, put$"
    ):
        found.opened(Shelf, object)
    with pytest.raises(
        InvalidSetting, match=r"^--store granite of the package acme cannot be used: KeyError: 'depth'$"
    ):
        found.opened(Shelf, {}.__getitem__, "depth")


def test_what_a_package_says_itself_is_told_as_it_is() -> None:
    def refuse() -> None:
        raise TransferFailed("nobody is there")

    with pytest.raises(TransferFailed, match=r"^nobody is there$"):
        plugins.Plugin("", None).opened(Shelf, refuse)
