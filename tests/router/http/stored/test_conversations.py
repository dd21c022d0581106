"""Named conversations: their items in order, by one owner, and gone when they are deleted."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.router.http.stored import conversations as module
from baton.router.http.stored.conversations import Conversations
from baton.router.http.stored.database import Database
from baton.router.http.stored.records import NoSuchItem, Page, Turn, Unfit, Version
from baton.router.http.stored.responses import Responses
from tests.router.http.stored.turns import KEEP_S, MAX_BYTES, SECRET, Clock, item, names, put, read_files, turn

ALL = Page(100)
NO_LIMIT = 2**40


@pytest.fixture
def conversations(database: Database) -> Conversations:
    found = Conversations(database)
    found.begin("alice", "conv", b"{}", [item("x"), item("y")])
    return found


def listed(conversations: Conversations, page: Page = ALL, owner: str = "alice") -> list[str] | None:
    found = conversations.listed(owner, "conv", page)
    return None if found is None else names(found.items)


def read(conversations: Conversations, before: str = "") -> tuple[list[str] | None, int]:
    found = conversations.read("alice", "conv", NO_LIMIT, before)
    assert found is not None
    return names(found.items), found.version.number


def test_items_come_with_responses_and_alone_and_are_listed_in_order(
    database: Database, conversations: Conversations
) -> None:
    put(database, "alice", turn("a", Version("conv", 1)))
    assert conversations.add("alice", "conv", [item("z")])
    assert read(conversations) == (["x", "y", "a?", "a!", "z"], 3)
    assert listed(conversations, Page(2, is_descending=True, after="z")) == ["a!", "a?"]
    assert listed(conversations, Page(9, after="a!")) == ["z"]
    with pytest.raises(NoSuchItem):
        listed(conversations, Page(9, after="other"))
    assert conversations.item("alice", "conv", "a!") == item("a!", 100, is_output=True)


def test_what_came_before_a_response_can_be_read_again(database: Database, conversations: Conversations) -> None:
    put(database, "alice", turn("a", Version("conv", 1)))
    conversations.add("alice", "conv", [item("z")])
    assert read(conversations, before="a")[0] == ["x", "y"]
    assert read(conversations, before="never stored")[0] == ["x", "y", "a?", "a!", "z"]


def test_a_conversation_that_is_too_long_is_listed_and_not_read(conversations: Conversations) -> None:
    with pytest.raises(Unfit, match="too long"):
        conversations.read("alice", "conv", 5)
    assert listed(conversations) == ["x", "y"]


def test_nobody_else_finds_changes_or_deletes_a_conversation(database: Database, conversations: Conversations) -> None:
    assert conversations.get("bob", "conv") is None
    assert conversations.change("bob", "conv", b"{1}") is None
    assert conversations.read("bob", "conv", NO_LIMIT) is None
    assert listed(conversations, owner="bob") is None
    assert conversations.item("bob", "conv", "x") is None
    assert conversations.add("bob", "conv", [item("z")]) is False
    assert conversations.delete_item("bob", "conv", "x") is None
    assert conversations.delete("bob", "conv") is None
    assert read(conversations) == (["x", "y"], 1)
    conversations.begin("bob", "conv", b"{}", [])  # an id is nothing without its owner
    assert (listed(conversations, owner="bob"), listed(conversations)) == ([], ["x", "y"])


def test_an_item_that_is_deleted_is_gone_from_its_response_too(
    database: Database, conversations: Conversations
) -> None:
    put(database, "alice", turn("a", Version("conv", 1)))
    left = conversations.delete_item("alice", "conv", "a!")
    assert left is not None
    assert (left.named, left.response_id) == (conversations.get("alice", "conv"), "a")
    assert read(conversations) == (["x", "y", "a?"], 3)
    found = Responses(database).get("alice", "a")
    assert found is not None
    assert names(found.items) == ["a?"]
    for name in ("x", "y", "a?"):
        conversations.delete_item("alice", "conv", name)
    assert conversations.delete_item("alice", "conv", "x") is None
    assert listed(conversations) == []
    assert database.link.execute("SELECT id FROM turn").fetchall() == [("a",)]  # added items leave nothing behind


def test_a_response_that_is_deleted_takes_its_items_along(database: Database, conversations: Conversations) -> None:
    put(database, "alice", turn("a", Version("conv", 1)))
    assert Responses(database).delete("alice", "a")
    assert read(conversations) == (["x", "y"], 3)
    for name in ("x", "y"):
        conversations.delete_item("alice", "conv", name)
    assert conversations.get("alice", "conv") is not None  # it is empty and still there


def test_metadata_is_replaced_and_changes_no_version(conversations: Conversations, clock: Clock) -> None:
    clock.now_s += 7
    changed = conversations.change("alice", "conv", b'{"a": "b"}')
    assert changed is not None
    assert changed == conversations.get("alice", "conv")
    assert (changed.metadata, changed.created_at) == (b'{"a": "b"}', 1_700_000_000)
    assert read(conversations)[1] == 1


def test_a_conversation_is_forgotten_some_time_after_its_last_change(
    database: Database, conversations: Conversations, clock: Clock
) -> None:
    for change in (
        lambda: conversations.add("alice", "conv", [item("z")]),
        lambda: conversations.change("alice", "conv", b"{}"),
        lambda: put(database, "alice", turn("a", Version("conv", 2))),
    ):
        clock.now_s += KEEP_S * 0.9
        assert conversations.get("alice", "conv") is not None
        change()
    clock.now_s += KEEP_S * 1.1
    assert conversations.get("alice", "conv") is None
    database.expire()
    assert database.link.execute("SELECT count(*) FROM item").fetchone() == (0,)


def test_only_so_many_items_are_added(conversations: Conversations, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ITEMS", 3)
    with pytest.raises(Unfit, match="at most 3 items"):
        conversations.add("alice", "conv", [item("z"), item("z2")])
    assert conversations.add("alice", "conv", [item("z")])


@pytest.mark.parametrize("way", ["conversation", "item"])
def test_nothing_is_left_in_the_files_of_what_was_deleted(tmp_path: Path, way: str) -> None:
    database = Database(tmp_path, MAX_BYTES, KEEP_S)
    database.expire()  # what an earlier life may have left is gone
    conversations = Conversations(database)
    conversations.begin("alice", "conv", SECRET if way == "conversation" else b"{}", [])
    database_item = item(SECRET.decode())
    put(database, "alice", Turn("a", Version("conv", 0), (database_item,), b"{}"))
    assert SECRET in read_files(tmp_path)
    if way == "conversation":
        assert conversations.delete("alice", "conv") == ["a"]
        assert Responses(database).get("alice", "a") is None
    else:
        assert conversations.delete_item("alice", "conv", database_item.item_id) is not None
    assert SECRET not in read_files(tmp_path)
    database.close()


def test_two_routers_see_the_same_conversation_and_the_first_response_of_a_version_is_stored(tmp_path: Path) -> None:
    one, other = (Database(tmp_path, MAX_BYTES, KEEP_S) for _ in range(2))
    Conversations(one).begin("alice", "conv", b"{}", [item("x")])
    put(other, "alice", turn("a", Version("conv", 1)))
    with pytest.raises(Unfit, match="has changed meanwhile"):
        put(one, "alice", turn("b", Version("conv", 1)))
    assert read(Conversations(one)) == (["x", "a?", "a!"], 2)
    for each in (one, other):
        each.close()
