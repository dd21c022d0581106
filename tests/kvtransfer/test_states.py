"""The tables of the states allow exactly the moves that docs/protocol.md names."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from baton.kvtransfer.states import RECEIVING_MOVES, SENDING_MOVES, Lifecycle, ReceivingState, SendingState

_PROTOCOL = Path(__file__).parents[2] / "docs" / "protocol.md"
S, R = SendingState, ReceivingState


def documented(side: str) -> dict[str, set[str]]:
    """The protocol's table for one side: each state and the states that may follow it."""
    _, _, after = _PROTOCOL.read_text().partition(f"| {side} | entered when | leaves to |\n|---|---|---|\n")
    rows = [line.split("|")[1:4] for line in itertools.takewhile(lambda line: line.startswith("|"), after.splitlines())]
    names = {state.name for state in (*S, *R)}
    return {
        row[0].strip(): {word for word in row[2].replace(",", " ").replace("(", " ").split() if word in names}
        for row in rows
    }


def test_the_protocol_has_the_senders_table() -> None:
    coded = {state.name: {target.name for target in targets} for state, targets in SENDING_MOVES.items()}
    assert documented("sender (P)") == coded
    assert coded.keys() == {state.name for state in S}


def test_the_protocol_has_the_receivers_table() -> None:
    coded = {state.name: {target.name for target in targets} for state, targets in RECEIVING_MOVES.items()}
    assert documented("receiver (D)") == coded
    assert coded.keys() == {state.name for state in R}


@pytest.mark.parametrize(("states", "moves"), [(S, SENDING_MOVES), (R, RECEIVING_MOVES)], ids=["sender", "receiver"])
def test_each_side_moves_as_its_table_says_and_not_otherwise(
    states: Iterable[Any], moves: dict[Any, frozenset[Any]]
) -> None:
    for old, new in itertools.product(states, repeat=2):
        life = Lifecycle(old, moves, 1.0)
        if new in moves[old]:
            life.enter(new, 3.5)
            assert (life.state, life.since_s, life.entered_s) == (new, 3.5, {old: 1.0, new: 3.5})
        else:
            with pytest.raises(RuntimeError, match=f"from {old.value} to {new.value}"):
                life.enter(new, 3.5)
            assert (life.state, life.entered_s) == (old, {old: 1.0})
