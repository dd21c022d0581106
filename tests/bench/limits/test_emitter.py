"""The emitter as a process, without a router."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from bench.limits.receivers import DirectReceiver

from bench.child import Child

COUNT, NUM_TOKENS, INTERVAL_S = 3, 8, 0.004


@pytest.fixture(scope="module")
def emitter() -> Iterator[tuple[Child, DirectReceiver]]:
    spec = {"fingerprint": "f", "token_id": 7}
    with Child("bench.limits.emitter_process", spec) as child, DirectReceiver() as receiver:
        child.hear()
        child.tell("join", end="direct", address=receiver.address)
        receiver.welcome()
        child.hear()
        yield child, receiver


def emit(child: Child) -> None:
    child.tell("emit", end="direct", count=COUNT, num_tokens=NUM_TOKENS, interval_s=INTERVAL_S)


def test_all_requests_of_a_step_come_in_one_message(emitter: tuple[Child, DirectReceiver]) -> None:
    child, receiver = emitter
    emit(child)
    received = receiver.receive([[1, 2, 3]] * COUNT, NUM_TOKENS, duration_s=1.0)
    child.hear()
    assert [len(each.token_s) for each in received] == [NUM_TOKENS] * COUNT
    assert len({tuple(each.token_s[1:]) for each in received}) == 1


def test_a_step_is_stamped_before_it_is_sent_and_never_early(emitter: tuple[Child, DirectReceiver]) -> None:
    child, receiver = emitter
    emit(child)
    received = receiver.receive([[1, 2, 3]] * COUNT, NUM_TOKENS, duration_s=1.0)
    stamps_s = child.hear()
    assert len(stamps_s) == NUM_TOKENS - 1
    assert all(made_s < came_s for made_s, came_s in zip(stamps_s, received[0].token_s[1:], strict=True))
    last_first_token_s = min(each.sent_s for each in received)
    assert all(made_s >= last_first_token_s + number * INTERVAL_S for number, made_s in enumerate(stamps_s, start=1))
