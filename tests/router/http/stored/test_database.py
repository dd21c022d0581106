"""Stored conversations in their database: what gives way, and what is left in the files."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest

from baton.router.http.stored import database as module
from baton.router.http.stored import file
from baton.router.http.stored.conversations import Conversations
from baton.router.http.stored.database import Database
from baton.router.http.stored.file import FILE_NAME
from baton.router.http.stored.records import Turn, Unfit
from baton.router.http.stored.responses import Responses
from tests.router.http.stored.turns import (
    KEEP_S,
    MAX_BYTES,
    SECRET,
    Clock,
    is_stored,
    item,
    names,
    put,
    read_files,
    turn,
)

NO_LIMIT = 2**40


def secret_turn(name: str, follows: str | None = None, size: int = 1) -> Turn:
    return Turn(name, follows, (item(f"{name}?" + SECRET.decode() * size),), SECRET * size)


def test_there_are_never_more_bytes_than_allowed_and_the_oldest_give_way(database: Database, clock: Clock) -> None:
    put(database, "alice", turn("first"))
    for number in range(60):
        clock.now_s += 1
        put(database, "alice", turn(f"{number}", None, 2**18))
        assert database.num_bytes <= MAX_BYTES
    assert not is_stored(database, "alice", "first")
    assert is_stored(database, "alice", "59")
    assert database.num_evicted + database.num_responses == 61
    kept = [number for number in range(60) if is_stored(database, "alice", f"{number}")]
    assert kept == list(range(kept[0], 60))
    assert len(kept) >= 0.8 * MAX_BYTES / 2**18


def test_the_owner_that_has_most_gives_way_first(database: Database, clock: Clock) -> None:
    put(database, "bob", turn("b"))
    for number in range(40):
        clock.now_s += 1
        put(database, "alice", turn(f"{number}", None, 2**18))
    assert is_stored(database, "bob", "b")


def test_metadata_counts_for_who_has_most(database: Database, clock: Clock) -> None:
    put(database, "bob", turn("b", None, 2**18))
    conversations = Conversations(database)
    for number in range(500):
        clock.now_s += 0.01
        conversations.begin("alice", f"{number}", b"", [])
        conversations.change("alice", f"{number}", bytes(9000))
    assert is_stored(database, "bob", "b")
    assert conversations.get("alice", "0") is None


def test_a_conversation_does_not_push_itself_out_and_what_is_too_large_not_others(
    database: Database, clock: Clock
) -> None:
    put(database, "bob", turn("b"))
    put(database, "alice", turn("a", None, MAX_BYTES // 2))
    clock.now_s += 1
    with pytest.raises(Unfit, match="no room"):
        put(database, "alice", turn("b", "a", MAX_BYTES // 2))
    with pytest.raises(Unfit, match="no room"):
        put(database, "bob", turn("c", None, MAX_BYTES))
    assert is_stored(database, "bob", "b")
    assert database.num_evicted == 0
    assert names(Responses(database).until("alice", "a", NO_LIMIT)) == ["a?", "a!"]


def test_there_are_never_more_responses_and_conversations_than_allowed(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_ROWS", 3)
    for number in range(5):
        put(database, "alice", turn(f"{number}"))
    assert database.num_responses == 3
    for number in range(5):
        Conversations(database).begin("alice", f"{number}", b"{}", [])
    assert database.link.execute("SELECT count(*) FROM conversation").fetchone() == (3,)


def test_two_routers_share_a_file_and_the_next_life_has_it_too(tmp_path: Path) -> None:
    first, second = (Database(tmp_path, MAX_BYTES, KEEP_S) for _ in range(2))
    put(first, "alice", turn("a"))
    put(second, "alice", turn("b", "a"))
    assert names(Responses(first).until("alice", "b", NO_LIMIT)) == ["a?", "a!", "b?", "b!"]
    assert Responses(second).delete("alice", "a")
    assert not is_stored(first, "alice", "a")
    for each in (first, second):
        each.close()
    third = Database(tmp_path, MAX_BYTES, KEEP_S)
    assert names(Responses(third).until("alice", "b", NO_LIMIT)) is None
    third.close()


def test_conversations_that_nobody_uses_give_way_like_others(database: Database, clock: Clock) -> None:
    conversations = Conversations(database)
    conversations.begin("alice", "first", bytes(9000), [item("x", 2**18)])
    for number in range(500):
        clock.now_s += 0.01
        conversations.begin("alice", f"{number}", bytes(9000), [])
        assert database.num_bytes <= MAX_BYTES
    assert conversations.get("alice", "first") is None
    assert conversations.get("alice", "499") is not None


@pytest.mark.parametrize("way", ["deleted", "too old", "pushed out"])
def test_nothing_is_left_in_the_files_of_what_was_removed(tmp_path: Path, clock: Clock, way: str) -> None:
    database = Database(tmp_path, MAX_BYTES, KEEP_S, clock)
    database.expire()  # what an earlier life may have left is gone
    for size in (1, 3000):  # in a page among others, and in pages of its own
        put(database, "alice", secret_turn(f"{size}", size=size))
    assert read_files(tmp_path).count(SECRET) > 5900
    if way == "deleted":
        assert Responses(database).delete("alice", "1")
        assert Responses(database).delete("alice", "3000")
    elif way == "too old":
        clock.now_s += 2 * KEEP_S
        database.expire()
    else:
        clock.now_s += 1
        for number in range(40):
            put(database, "alice", turn(f"other {number}", None, 2**18))
        database.expire()
    assert read_files(tmp_path).count(SECRET) == 0
    database.close()


def test_what_another_router_was_reading_is_overwritten_at_the_next_occasion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file, "_BUSY_S", 0.0)
    database = Database(tmp_path, MAX_BYTES, KEEP_S)
    put(database, "alice", secret_turn("a"))
    reader = sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)
    reader.execute("BEGIN")
    assert reader.execute("SELECT id FROM turn").fetchone() == ("a",)
    assert Responses(database).delete("alice", "a")
    reader.execute("COMMIT")
    database.expire()
    assert read_files(tmp_path).count(SECRET) == 0
    reader.close()
    database.close()


@pytest.mark.parametrize("what", ["item", "response", "metadata"])
def test_what_is_damaged_is_not_returned(tmp_path: Path, what: str) -> None:
    database = Database(tmp_path, MAX_BYTES, KEEP_S)
    Conversations(database).begin("alice", "conv", SECRET if what == "metadata" else b"{}", [])
    text, response = ("x", SECRET) if what == "response" else (SECRET.decode(), b"{}")
    if what != "metadata":
        put(database, "alice", Turn("a", None, (item(text),), response))
    put(database, "alice", turn("b"))
    database.close()
    path = tmp_path / FILE_NAME
    path.write_bytes(path.read_bytes().replace(SECRET, SECRET.upper()))
    database = Database(tmp_path, MAX_BYTES, KEEP_S)
    with pytest.raises(sqlite3.DatabaseError, match="damaged"):
        Conversations(database).get("alice", "conv") if what == "metadata" else Responses(database).get("alice", "a")
    assert Responses(database).get("alice", "b") == turn("b")
    assert what == "metadata" or Responses(database).delete("alice", "a")
    database.close()


def test_a_full_disk_refuses_and_changes_nothing(tmp_path: Path) -> None:
    database = Database(tmp_path, 2**30, KEEP_S)
    put(database, "alice", turn("a"))
    database.link.execute("PRAGMA max_page_count = 20")
    with pytest.raises(sqlite3.OperationalError, match="full"):
        put(database, "alice", turn("b", "a", 2**20))
    assert names(Responses(database).until("alice", "a", NO_LIMIT)) == ["a?", "a!"]
    assert database.num_responses == 1
    put(database, "alice", turn("c", "a"))
    database.close()


def test_a_router_that_was_killed_leaves_whole_responses_and_the_next_one_cleans_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = os.fork()
    if not child:
        monkeypatch.setattr(Database, "clean", lambda _: os._exit(0))
        database = Database(tmp_path, MAX_BYTES, KEEP_S)
        put(database, "alice", turn("a"))
        put(database, "alice", secret_turn("b", "a"))
        Responses(database).delete("alice", "b")
    os.waitpid(child, 0)
    assert SECRET in read_files(tmp_path)
    database = Database(tmp_path, MAX_BYTES, KEEP_S)
    assert Responses(database).get("alice", "a") == turn("a")
    assert not is_stored(database, "alice", "b")
    database.expire()
    assert SECRET not in read_files(tmp_path)
    database.close()
