"""The file of stored responses: only its owner enters it, and what is none of ours is left alone."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from baton.router.http.stored import file as module
from baton.router.http.stored.database import Database
from baton.router.http.stored.file import FILE_NAME, open_in_folder
from baton.wire.errors import InvalidSetting
from tests.router.http.stored.turns import KEEP_S, MAX_BYTES, put, turn


def test_only_the_owner_enters_folder_and_files(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    database = Database(folder, MAX_BYTES, KEEP_S)
    put(database, "alice", turn("a"))
    assert folder.stat().st_mode & 0o777 == 0o700
    files = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert files == dict.fromkeys([FILE_NAME, f"{FILE_NAME}-wal", f"{FILE_NAME}-shm"], 0o600)
    database.close()
    folder.chmod(0o750)
    with pytest.raises(InvalidSetting, match="only its owner"):
        open_in_folder(folder)


@pytest.mark.parametrize("what", ["no database", "another version", "cut", "a file in its place"])
def test_a_file_that_cannot_be_used_is_said_at_the_start_and_left_alone(tmp_path: Path, what: str) -> None:
    folder = tmp_path / "store"
    open_in_folder(folder).close()
    file = folder / FILE_NAME
    if what == "another version":
        with sqlite3.connect(file) as link:
            link.execute("PRAGMA user_version = 1")
        link.close()
    elif what == "a file in its place":
        folder = file
    else:
        file.write_bytes(b"no database" * 1000 if what == "no database" else file.read_bytes()[:50])
    before = file.read_bytes()
    with pytest.raises(InvalidSetting, match="--responses-store "):
        open_in_folder(folder)
    assert file.read_bytes() == before


def test_a_file_that_can_only_be_read_is_said_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_in_folder(tmp_path).close()

    def connected(name: str) -> sqlite3.Connection:  # what SQLite does on a file system that cannot be written
        return sqlite3.connect(f"file:{name}?mode=ro", uri=True, isolation_level=None)

    monkeypatch.setattr(module, "_connected", connected)
    with pytest.raises(InvalidSetting, match="readonly"):
        open_in_folder(tmp_path)
