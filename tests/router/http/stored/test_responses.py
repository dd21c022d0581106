"""Stored responses by their ids: who finds what, in which order, and what a gap does."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from baton.router.http.stored import responses as module
from baton.router.http.stored.conversations import Conversations
from baton.router.http.stored.database import Database
from baton.router.http.stored.records import Item, ItemRow, NoSuchItem, Page, Unfit, Version
from baton.router.http.stored.responses import Responses
from tests.router.http.stored.turns import KEEP_S, Clock, item, names, put, turn

ALL = Page(100)
NO_LIMIT = 2**40


@pytest.fixture
def responses(database: Database) -> Responses:
    return Responses(database)


def input_of(responses: Responses, name: str, page: Page = ALL, owner: str = "alice") -> list[str] | None:
    found = responses.listed_input(owner, name, page)
    return None if found is None else names(found.items)


def test_a_conversation_is_what_a_response_follows_in_order(database: Database, responses: Responses) -> None:
    put(database, "alice", turn("a"), turn("b", "a"), turn("c", "b"), turn("d", "b"))
    assert names(responses.until("alice", "c", NO_LIMIT)) == ["a?", "a!", "b?", "b!", "c?", "c!"]
    assert names(responses.until("alice", "d", NO_LIMIT)) == ["a?", "a!", "b?", "b!", "d?", "d!"]
    assert input_of(responses, "d") == ["a?", "a!", "b?", "b!", "d?"]
    assert responses.get("alice", "b") == turn("b", "a")
    assert responses.until("alice", "x", NO_LIMIT) is None
    assert input_of(responses, "x") is None


def test_nobody_else_finds_or_deletes_a_response(database: Database, responses: Responses) -> None:
    put(database, "alice", turn("a"))
    put(database, "bob", turn("b"))
    assert responses.get("bob", "a") is None
    assert responses.until("bob", "a", NO_LIMIT) is None
    assert input_of(responses, "a", owner="bob") is None
    assert responses.delete("bob", "a") is False
    with pytest.raises(Unfit):
        put(database, "bob", turn("c", "a"))
    assert responses.get("alice", "a") == turn("a")


def test_what_is_stored_twice_is_there_once(database: Database, responses: Responses) -> None:
    put(database, "alice", turn("a"), turn("a"))
    put(database, "bob", turn("a", None, 7))  # an id is nothing without its owner
    assert database.num_responses == 2
    assert responses.delete("alice", "a")
    assert responses.get("bob", "a") == turn("a", None, 7)


def test_a_chain_of_which_one_was_deleted_is_listed_behind_it_and_not_continued(
    database: Database, responses: Responses
) -> None:
    put(database, "alice", turn("a"), turn("b", "a"), turn("c", "b"))
    assert responses.delete("alice", "a")
    assert input_of(responses, "c") == ["b?", "b!", "c?"]
    assert responses.until("alice", "c", NO_LIMIT) is None
    assert responses.get("alice", "b") == turn("b", "a")
    assert responses.delete("alice", "b")
    with pytest.raises(Unfit, match="is gone"):
        put(database, "alice", turn("d", "b"))
    assert responses.delete("alice", "c")
    assert responses.delete("alice", "c") is False
    assert database.link.execute("SELECT count(*) FROM conversation").fetchone() == (0,)


def test_a_chain_is_forgotten_as_a_whole_some_time_after_its_last_response(
    database: Database, responses: Responses, clock: Clock
) -> None:
    put(database, "alice", turn("a"))
    clock.now_s += KEEP_S * 0.9
    put(database, "alice", turn("b", "a"))
    clock.now_s += KEEP_S * 0.9
    assert names(responses.until("alice", "b", NO_LIMIT)) == ["a?", "a!", "b?", "b!"]
    clock.now_s += KEEP_S * 0.2
    assert responses.get("alice", "b") is None
    assert database.num_responses == 2
    database.expire()
    assert database.num_responses == 0


def test_a_chain_that_is_too_long_is_not_read(
    database: Database, responses: Responses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_TURNS", 3)
    put(database, "alice", *(turn(f"{number}", f"{number - 1}" if number else None) for number in range(4)))
    found = responses.until("alice", "2", NO_LIMIT)
    assert found is not None
    num_bytes = sum(len(each.content) for each in found)
    assert responses.until("alice", "2", num_bytes) == found
    with pytest.raises(Unfit, match="too long"):
        responses.until("alice", "2", num_bytes - 1)
    with pytest.raises(Unfit, match="too long"):
        responses.until("alice", "3", NO_LIMIT)


def test_a_page_of_the_input_reads_its_own_items_alone(
    database: Database, responses: Responses, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(database, "alice", *(turn(f"{number}", f"{number - 1}" if number else None) for number in range(9)))
    num_read: list[int] = []
    items = Database.items

    def counted(database: Database, owner: str, rows: Sequence[ItemRow]) -> list[Item]:
        num_read.append(len(rows))
        return items(database, owner, rows)

    monkeypatch.setattr(Database, "items", counted)
    assert input_of(responses, "8", Page(2)) == ["0?", "0!"]
    assert input_of(responses, "8", Page(2, after="3?")) == ["3!", "4?"]
    assert input_of(responses, "8", Page(3, is_descending=True, after="8?")) == ["7!", "7?", "6!"]
    with pytest.raises(NoSuchItem):
        input_of(responses, "8", Page(2, after="8!"))  # its own output is no input of it
    assert num_read == [2, 2, 3]


def test_a_response_of_a_conversation_follows_what_that_had_before_and_is_no_link_of_a_chain(
    database: Database, responses: Responses
) -> None:
    conversations = Conversations(database)
    conversations.begin("alice", "conv", b"{}", [item("x")])
    put(database, "alice", turn("a", Version("conv", 1)))
    conversations.add("alice", "conv", [item("y")])
    put(database, "alice", turn("b", Version("conv", 3)))
    assert input_of(responses, "b") == ["x", "a?", "a!", "y", "b?"]
    with pytest.raises(Unfit, match="belongs to a conversation"):
        responses.until("alice", "b", NO_LIMIT)


def test_a_response_is_stored_in_its_conversation_only_as_that_was_read(database: Database) -> None:
    conversations = Conversations(database)
    conversations.begin("alice", "conv", b"{}", [item("x")])
    put(database, "alice", turn("a", Version("conv", 1)))
    for owner, version in (("alice", Version("conv", 1)), ("bob", Version("conv", 2)), ("alice", Version("other", 2))):
        with pytest.raises(Unfit, match="has changed meanwhile, or is gone"):
            put(database, owner, turn("b", version))
    put(database, "alice", turn("a", Version("conv", 1)))  # it is stored already
    assert database.num_responses == 1
