"""A session between two ends whose connection loses, repeats and delays messages."""

from __future__ import annotations

import gc
import random
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

import baton.wire.session
from baton.wire.images import PromptImage, digest_of
from baton.wire.messages.legs import Cancel, Prefill
from baton.wire.messages.vocabulary import ROUTER_TO_NODE
from baton.wire.prompt import Prompt
from baton.wire.sampling import DecodingParams
from baton.wire.session import Session, number_of

NUMBER = 2**33


def message(index: int) -> Cancel:
    return Cancel(index.to_bytes(16, "big"), 1)


def sent(end: Session, *indexes: int) -> list[list[bytes]]:
    return [end.frames(message(index)) for index in indexes]


def again(end: Session, index: int) -> list[list[bytes]] | None:
    found = end.since(NUMBER + index)
    return None if found is None else list(found)


def content(frames: list[bytes]) -> object:
    return ROUTER_TO_NODE.decode(frames[-1])


@pytest.fixture
def ends() -> tuple[Session, Session]:
    return Session(NUMBER, ROUTER_TO_NODE), Session(NUMBER, ROUTER_TO_NODE)


def test_messages_are_accepted_once_and_in_order(ends: tuple[Session, Session]) -> None:
    here, there = ends
    first, second, third = (number_of(frames) for frames in sent(here, 1, 2, 3))
    assert [there.accept(number) for number in (first, first, third, second, second)] == [
        True,
        False,
        False,
        True,
        False,
    ]
    assert there.received == second


def test_a_gap_is_asked_about_once_until_something_comes(ends: tuple[Session, Session]) -> None:
    here, there = ends
    numbers = [number_of(frames) for frames in sent(here, 1, 2, 3, 4)]
    assert [there.must_ask(number) for number in numbers[1:]] == [True, False, False]
    assert there.accept(numbers[0])
    assert [there.must_ask(number) for number in numbers[2:]] == [True, False]


def test_what_was_acknowledged_is_not_kept_and_the_rest_can_be_sent_again(ends: tuple[Session, Session]) -> None:
    here, _ = ends
    frames = sent(here, 1, 2, 3)
    assert again(here, 1) == frames
    here.acknowledge(NUMBER + 2)
    assert again(here, 1) is None
    assert again(here, 3) == frames[2:]
    assert again(here, 4) == []
    assert again(here, 5) is None


def test_an_acknowledgement_of_what_was_never_sent_changes_nothing(ends: tuple[Session, Session]) -> None:
    here, _ = ends
    frames = sent(here, 1, 2)
    here.acknowledge(NUMBER + 3)
    here.acknowledge(0)
    assert again(here, 1) == frames
    assert here.is_untouched


def test_a_message_of_another_session_is_neither_accepted_nor_asked_about(ends: tuple[Session, Session]) -> None:
    _, there = ends
    other = Session(2**50, ROUTER_TO_NODE)
    number = number_of(sent(other, 1)[0])
    assert not there.accept(number)
    assert not there.must_ask(number)
    assert not there.lacks(number)


def test_too_much_without_an_acknowledgement_is_noticed(
    ends: tuple[Session, Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, _ = ends
    monkeypatch.setattr(baton.wire.session, "MAX_UNACKNOWLEDGED_BYTES", 150)
    sent(here, 1, 2)
    assert not here.is_overfull
    sent(here, 3, 4)
    assert here.is_overfull
    here.acknowledge(NUMBER + 3)
    assert not here.is_overfull


def with_image(num_rows: int) -> Prefill:
    pixels = b"pixels" * 100 * num_rows
    image = PromptImage(1, 1, digest_of(num_rows, 200, pixels), pixels, num_rows, 200)
    return Prefill(b"h" * 16, 1, Prompt((1, 2, 3), b"", (image,)), DecodingParams(), "decode-1", 8)


def test_pixels_do_not_fill_a_session_and_are_kept_once(
    ends: tuple[Session, Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, _ = ends
    asked = [with_image(num_rows) for num_rows in (1, 2, 100)]
    frames = [here.frames(message) for message in asked]
    num_other_bytes = sum(len(each[1]) for each in frames) - 600 * (1 + 2 + 100)
    monkeypatch.setattr(baton.wire.session, "MAX_UNACKNOWLEDGED_BYTES", num_other_bytes)
    assert not here.is_overfull
    assert again(here, 1) == frames
    # the rest of such messages fills it like any other
    monkeypatch.setattr(baton.wire.session, "MAX_UNACKNOWLEDGED_BYTES", num_other_bytes - 1)
    assert here.is_overfull
    here.acknowledge(NUMBER + 2)
    assert not here.is_overfull
    # what is kept is the image itself, so that whoever counts images counts it until it is acknowledged
    image = weakref.ref(asked[2].prompt.media[0])
    del asked, frames
    assert image() is not None
    here.acknowledge(NUMBER + 3)
    gc.collect()
    assert image() is None


@given(st.integers(0, 2**32), st.floats(0, 0.9))
def test_whatever_the_connection_loses_repeats_and_cuts_off_everything_arrives_once_in_order(
    seed: int, share_lost: float
) -> None:
    chance = random.Random(seed)
    here, there = Session(NUMBER, ROUTER_TO_NODE), Session(NUMBER, ROUTER_TO_NODE)
    under_way: list[list[bytes]] = []
    arrived: list[object] = []

    def put(frames: list[bytes]) -> None:
        if chance.random() >= share_lost:
            under_way.extend([frames] * chance.choice((1, 1, 1, 2)))

    def take(num: int) -> None:
        for frames in under_way[:num]:
            if there.accept(number_of(frames)):
                arrived.append(content(frames))
        del under_way[:num]

    def beat() -> None:
        """A Ping and its Pong, on the same connection as the messages before them."""
        take(len(under_way))
        here.acknowledge(there.received)
        if there.lacks(here.sent):
            for frames in here.since(there.received + 1) or ():
                put(frames)

    for index in range(40):
        put(here.frames(message(index)))
        take(chance.randrange(3))
        if chance.random() < 0.2:
            under_way.clear()  # the connection broke
        if chance.random() < 0.2:
            beat()
    share_lost = 0.0
    beat()
    beat()
    assert arrived == [message(index) for index in range(40)]
    assert again(here, here.sent + 1 - NUMBER) == []
