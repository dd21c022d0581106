"""A journal that is removed is gone at once, and however slow the disk is, nobody waits for its blocks."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from baton.router.http.resume import logs
from baton.router.http.resume.logs import Folder, Log


def written(folder: Folder, name: str) -> Log:
    log: Log = folder.create(name)
    log.append(b"x")
    return log


def names(number: int) -> str:
    return f"cmpl-{number:024x}"


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Unlinking a file on another thread than this one waits for it."""
    is_there, unlink, mine = threading.Event(), Path.unlink, threading.get_ident()

    def slow(path: Path, *, missing_ok: bool = False) -> None:
        if threading.get_ident() != mine:
            assert is_there.wait(10.0)
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", slow)
    return is_there


def test_whoever_removes_a_journal_does_not_wait_for_the_disk(tmp_path: Path, disk: threading.Event) -> None:
    folder = Folder(tmp_path / "new")
    for number in range(3):
        written(folder, names(number)).remove()
    assert list(folder.found(60.0)) == []
    assert len(list((tmp_path / "new").glob("*.stream.removed"))) == 3, "their blocks are still there"
    disk.set()
    folder.close()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["owner.lock"]


def test_what_a_router_could_not_unlink_the_next_one_does_and_nobody_resumes_it(tmp_path: Path) -> None:
    first = Folder(tmp_path / "new")
    written(first, names(2)).rest()
    first.close()
    (tmp_path / "new" / f"{names(1)}.stream.removed").touch()
    second = Folder(tmp_path / "new")
    assert [name for name, _ in second.found(60.0)] == [names(2)]
    second.close()
    assert list((tmp_path / "new").glob("*.removed")) == []


def test_so_many_removals_may_be_due_and_who_has_more_does_them(
    tmp_path: Path, disk: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_MAX_REMOVALS", 2)
    folder = Folder(tmp_path / "new")
    for number in range(9):
        written(folder, names(number)).remove()
    assert len(list((tmp_path / "new").glob("*.removed"))) <= 3, "two that are due, and one that is being unlinked"
    disk.set()
    folder.close()


def test_a_journal_that_is_removed_twice_or_was_never_written_is_no_error(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "new")
    log = written(folder, names(1))
    for each in (log, log, folder.create(names(2))):
        each.remove()
    folder.close()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["owner.lock"]
