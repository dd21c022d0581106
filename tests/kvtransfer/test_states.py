from __future__ import annotations

import itertools

import pytest

from kvtransfer.states import RECEIVING_MOVES, SENDING_MOVES, Progress, ReceivingState, SendingState

S, R = SendingState, ReceivingState
_SENDING = {
    (S.COMPUTING, S.PUSHING),
    (S.COMPUTING, S.WITHDRAWING),
    (S.PUSHING, S.COMMITTED),
    (S.COMMITTED, S.PUSHING),
    (S.PUSHING, S.WITHDRAWING),
    (S.COMMITTED, S.ENDED),
    (S.COMMITTED, S.WITHDRAWING),
    (S.WITHDRAWING, S.ENDED),
}
_RECEIVING = {
    (R.COMMITTED, R.GRANTED),
    (R.GRANTED, R.COMMITTED),
    (R.GRANTED, R.REVOKING),
    (R.GRANTED, R.ENDED),
    (R.COMMITTED, R.DELIVERED),
    (R.COMMITTED, R.REVOKING),
    (R.COMMITTED, R.ENDED),
    (R.DELIVERED, R.ENDED),
    (R.REVOKING, R.ENDED),
}


@pytest.mark.parametrize(("old", "new"), list(itertools.product(S, S)))
def test_sender_moves_as_documented_and_not_otherwise(old: SendingState, new: SendingState) -> None:
    progress = Progress(old)
    if (old, new) in _SENDING:
        progress.move(new, SENDING_MOVES, 3.5)
        assert (progress.state, progress.stamps) == (new, {new: 3.5})
    else:
        with pytest.raises(RuntimeError, match=f"from {old.value} to {new.value}"):
            progress.move(new, SENDING_MOVES, 3.5)
        assert progress.state is old


@pytest.mark.parametrize(("old", "new"), list(itertools.product(R, R)))
def test_receiver_moves_as_documented_and_not_otherwise(old: ReceivingState, new: ReceivingState) -> None:
    progress = Progress(old)
    if (old, new) in _RECEIVING:
        progress.move(new, RECEIVING_MOVES, 3.5)
        assert (progress.state, progress.stamps) == (new, {new: 3.5})
    else:
        with pytest.raises(RuntimeError, match=f"from {old.value} to {new.value}"):
            progress.move(new, RECEIVING_MOVES, 3.5)
        assert progress.state is old
