from __future__ import annotations

import struct

from engine.scheduler.request import PromptScores
from node.events import prompt_logprobs
from tests.request_keys import A
from wire.messages import NODE_TO_ROUTER
from wire.prompt_logprobs import MAX_ROWS, read_rows


def test_a_long_prompt_is_told_in_messages_of_bounded_size() -> None:
    num_rows = 2 * MAX_ROWS + 3
    rows = b"".join(struct.pack("<fIIf", -float(place), place, 7, -0.5) for place in range(num_rows))
    messages = list(prompt_logprobs(PromptScores(A, 5, 1, rows, True), epoch=9))
    assert [(message.first, message.num_rows) for message in messages] == [
        (5, MAX_ROWS),
        (5 + MAX_ROWS, MAX_ROWS),
        (5 + 2 * MAX_ROWS, 3),
    ]
    received = [NODE_TO_ROUTER.decode(NODE_TO_ROUTER.encode(message)) for message in messages]
    found = [row for message in received for row in read_rows(message.rows, message.num_top)]
    assert [(row.logprob, row.rank) for row in found] == [(-float(place), place) for place in range(num_rows)]
    assert {(row.top_ids, row.top_logprobs) for row in found} == {((7,), (-0.5,))}
