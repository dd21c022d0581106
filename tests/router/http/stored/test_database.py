"""Stored responses in their database: who finds what, what gives way, and what is left in the files."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from baton.router.http.stored import database as module
from baton.router.http.stored.database import FILE_NAME, Database, Turn, Unfit
from baton.wire.errors import InvalidSetting

MAX_BYTES, KEEP_S = 4 * 2**20, 100.0
SECRET = b"the cat is called Minka"


@dataclass(slots=True)
class Clock:
    now_s: float = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["memory", "file"])
def database(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Iterator[Database]:
    found = Database(tmp_path / "store" if request.param == "file" else None, MAX_BYTES, KEEP_S, clock)
    yield found
    found.close()


def turn(name: str, previous: str | None = None, num_bytes: int = 100) -> Turn:
    return Turn(name, previous, b"[%s]" % name.encode(), bytes(num_bytes))


def names(turns: list[Turn]) -> list[str]:
    return [each.response_id for each in turns]


def read_files(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.iterdir())


def test_a_conversation_is_what_a_response_follows_in_order(database: Database) -> None:
    for each in (turn("a"), turn("b", "a"), turn("c", "b"), turn("d", "b")):
        database.put("alice", each)
    assert names(database.conversation("alice", "c")) == ["a", "b", "c"]
    assert names(database.conversation("alice", "d")) == ["a", "b", "d"]
    assert database.get("alice", "b") == turn("b", "a")
    assert database.conversation("alice", "x") == []


def test_nobody_else_finds_or_deletes_a_response(database: Database) -> None:
    database.put("alice", turn("a"))
    database.put("bob", turn("b", None))
    assert database.get("bob", "a") is None
    assert database.conversation("bob", "a") == []
    assert database.delete("bob", "a") is False
    with pytest.raises(Unfit):
        database.put("bob", turn("c", "a"))
    assert database.get("alice", "a") == turn("a")


def test_what_is_stored_twice_is_there_once(database: Database) -> None:
    for _ in range(2):
        database.put("alice", turn("a"))
    database.put("bob", turn("a", None, 7))  # an id is nothing without its owner
    assert database.num_responses == 2
    assert database.delete("alice", "a")
    assert database.get("bob", "a") == turn("a", None, 7)


def test_a_conversation_of_which_one_was_deleted_begins_behind_it(database: Database) -> None:
    for each in (turn("a"), turn("b", "a"), turn("c", "b")):
        database.put("alice", each)
    assert database.delete("alice", "a")
    assert names(database.conversation("alice", "c")) == ["b", "c"]
    assert database.conversation("alice", "c")[0].previous_id == "a"
    assert database.delete("alice", "b")
    with pytest.raises(Unfit):
        database.put("alice", turn("d", "b"))
    assert database.delete("alice", "c")
    assert database.delete("alice", "c") is False
    assert database.num_responses == 0


def test_a_conversation_is_forgotten_as_a_whole_some_time_after_its_last_response(
    database: Database, clock: Clock
) -> None:
    database.put("alice", turn("a"))
    clock.now_s += KEEP_S * 0.9
    database.put("alice", turn("b", "a"))
    clock.now_s += KEEP_S * 0.9
    assert names(database.conversation("alice", "b")) == ["a", "b"]
    clock.now_s += KEEP_S * 0.2
    assert database.get("alice", "b") is None
    assert database.num_responses == 2
    database.expire()
    assert database.num_responses == 0


def test_there_are_never_more_bytes_than_allowed_and_the_oldest_give_way(database: Database, clock: Clock) -> None:
    database.put("alice", turn("first"))
    for number in range(60):
        clock.now_s += 1
        database.put("alice", turn(f"{number}", None, 2**18))
        assert database.num_bytes <= MAX_BYTES
    assert database.get("alice", "first") is None
    assert database.get("alice", "59") is not None
    assert database.num_evicted + database.num_responses == 61
    kept = [number for number in range(60) if database.get("alice", f"{number}") is not None]
    assert kept == list(range(kept[0], 60))
    assert len(kept) >= 0.8 * MAX_BYTES / 2**18


def test_the_owner_that_has_most_gives_way_first(database: Database, clock: Clock) -> None:
    database.put("bob", turn("b"))
    for number in range(40):
        clock.now_s += 1
        database.put("alice", turn(f"{number}", None, 2**18))
    assert database.get("bob", "b") is not None


def test_a_conversation_does_not_push_itself_out_and_what_is_too_large_not_others(
    database: Database, clock: Clock
) -> None:
    database.put("alice", turn("a", None, MAX_BYTES // 2))
    clock.now_s += 1
    with pytest.raises(Unfit, match="no room"):
        database.put("alice", turn("b", "a", MAX_BYTES // 2))
    with pytest.raises(Unfit, match="no room"):
        database.put("bob", turn("c", None, MAX_BYTES))
    assert names(database.conversation("alice", "a")) == ["a"]


def test_there_are_never_more_responses_than_allowed(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_RESPONSES", 3)
    for number in range(5):
        database.put("alice", turn(f"{number}"))
    assert database.num_responses == 3


def test_a_conversation_that_is_too_long_is_not_read(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TURNS", 3)
    for number in range(4):
        database.put("alice", turn(f"{number}", f"{number - 1}" if number else None))
    limits = {"max_turns": 4}
    assert len(database.conversation("alice", "2", **limits)) == 3
    with pytest.raises(Unfit, match="too long"):
        database.conversation("alice", "3", **limits)
    with pytest.raises(Unfit, match="too long"):
        database.conversation("alice", "2", max_bytes=308, **limits)
    assert database.conversation("alice", "2", max_bytes=309, **limits)


def test_two_routers_share_a_file_and_the_next_life_has_it_too(tmp_path: Path) -> None:
    first, second = (Database(tmp_path, MAX_BYTES, KEEP_S) for _ in range(2))
    first.put("alice", turn("a"))
    second.put("alice", turn("b", "a"))
    assert names(first.conversation("alice", "b")) == ["a", "b"]
    assert second.delete("alice", "a")
    assert first.get("alice", "a") is None
    for each in (first, second):
        each.close()
    third = Database(tmp_path, MAX_BYTES, KEEP_S)
    assert names(third.conversation("alice", "b")) == ["b"]
    third.close()


@pytest.mark.parametrize("way", ["deleted", "too old", "pushed out"])
def test_nothing_is_left_in_the_files_of_what_was_removed(tmp_path: Path, clock: Clock, way: str) -> None:
    database = Database(tmp_path, MAX_BYTES, KEEP_S, clock)
    for size in (1, 3000):  # in a page among others, and in pages of its own
        database.put("alice", Turn(f"{size}", None, SECRET * size, SECRET * size))
    assert read_files(tmp_path).count(SECRET) > 5900
    if way == "deleted":
        assert database.delete("alice", "1")
        assert database.delete("alice", "3000")
    elif way == "too old":
        clock.now_s += 2 * KEEP_S
        database.expire()
    else:
        clock.now_s += 1
        for number in range(40):
            database.put("alice", turn(f"other {number}", None, 2**18))
        database.expire()
    assert read_files(tmp_path).count(SECRET) == 0
    database.close()


def test_what_another_router_was_reading_is_overwritten_at_the_next_occasion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BUSY_S", 0.0)
    database = Database(tmp_path, MAX_BYTES, KEEP_S)
    database.put("alice", Turn("a", None, SECRET, SECRET))
    reader = sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)
    reader.execute("BEGIN")
    assert reader.execute("SELECT id FROM turn").fetchone() == ("a",)
    assert database.delete("alice", "a")
    reader.execute("COMMIT")
    database.expire()
    assert read_files(tmp_path).count(SECRET) == 0
    reader.close()
    database.close()


def test_only_the_owner_enters_folder_and_files(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    database = Database(folder, MAX_BYTES, KEEP_S)
    database.put("alice", turn("a"))
    assert folder.stat().st_mode & 0o777 == 0o700
    files = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert files == dict.fromkeys([FILE_NAME, f"{FILE_NAME}-wal", f"{FILE_NAME}-shm"], 0o600)
    database.close()
    folder.chmod(0o750)
    with pytest.raises(InvalidSetting, match="only its owner"):
        Database(folder, MAX_BYTES, KEEP_S)


@pytest.mark.parametrize("what", ["no database", "another version", "cut", "a file in its place"])
def test_a_file_that_cannot_be_used_is_said_at_the_start_and_left_alone(tmp_path: Path, what: str) -> None:
    folder = tmp_path / "store"
    Database(folder, MAX_BYTES, KEEP_S).close()
    file = folder / FILE_NAME
    if what == "another version":
        with sqlite3.connect(file) as link:
            link.execute("PRAGMA user_version = 2")
        link.close()
    elif what == "a file in its place":
        folder = file
    else:
        file.write_bytes(b"no database" * 1000 if what == "no database" else file.read_bytes()[:50])
    before = file.read_bytes()
    with pytest.raises(InvalidSetting, match="--responses-store "):
        Database(folder, MAX_BYTES, KEEP_S)
    assert file.read_bytes() == before


def test_a_file_that_can_only_be_read_is_said_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Database(tmp_path, MAX_BYTES, KEEP_S).close()

    def connected(name: str) -> sqlite3.Connection:  # what SQLite does on a file system that cannot be written
        return sqlite3.connect(f"file:{name}?mode=ro", uri=True, isolation_level=None)

    monkeypatch.setattr(module, "_connected", connected)
    with pytest.raises(InvalidSetting, match="readonly"):
        Database(tmp_path, MAX_BYTES, KEEP_S)


def test_what_is_damaged_is_not_returned(tmp_path: Path) -> None:
    database = Database(tmp_path, MAX_BYTES, KEEP_S)
    database.put("alice", Turn("a", None, b"[]", SECRET))
    database.put("alice", turn("b"))
    database.close()
    file = tmp_path / FILE_NAME
    file.write_bytes(file.read_bytes().replace(SECRET, SECRET.upper()))
    database = Database(tmp_path, MAX_BYTES, KEEP_S)
    with pytest.raises(sqlite3.DatabaseError, match="damaged"):
        database.get("alice", "a")
    assert database.get("alice", "b") == turn("b")
    assert database.delete("alice", "a")
    database.close()


def test_a_full_disk_refuses_and_changes_nothing(tmp_path: Path) -> None:
    database = Database(tmp_path, 2**30, KEEP_S)
    database.put("alice", turn("a"))
    database._link.execute("PRAGMA max_page_count = 20")
    with pytest.raises(sqlite3.OperationalError, match="full"):
        database.put("alice", turn("b", "a", 2**20))
    assert names(database.conversation("alice", "a")) == ["a"]
    assert database.num_responses == 1
    database.put("alice", turn("c", "a"))
    database.close()


def test_a_router_that_was_killed_leaves_whole_responses_and_the_next_one_cleans_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = os.fork()
    if not child:
        monkeypatch.setattr(Database, "clean", lambda _: os._exit(0))
        database = Database(tmp_path, MAX_BYTES, KEEP_S)
        database.put("alice", turn("a"))
        database.put("alice", Turn("b", "a", SECRET, SECRET))
        database.delete("alice", "b")
    os.waitpid(child, 0)
    assert SECRET in read_files(tmp_path)
    database = Database(tmp_path, MAX_BYTES, KEEP_S)
    assert database.get("alice", "a") == turn("a")
    assert database.get("alice", "b") is None
    database.expire()
    assert SECRET not in read_files(tmp_path)
    database.close()
