from __future__ import annotations

import struct

from baton.engine.scheduler.reading import RowsRead
from baton.engine.scheduler.step import RequestOutput, SampledToken
from baton.engine.structured.matcher import OUT_OF_RESOURCES, WORN_OUT
from baton.node.events import failure_of, prompt_read, token_event
from baton.wire.drafts import VerifiedDraft
from baton.wire.errors import InvalidRequest, RequestFailed
from baton.wire.messages.output import MAX_READ_BYTES
from baton.wire.messages.vocabulary import NODE_TO_ROUTER
from baton.wire.prompt_logprobs import read_rows
from baton.wire.tiers import TierTokens
from tests.request_keys import A


def test_a_long_prompt_is_told_in_messages_of_bounded_size() -> None:
    most_rows = MAX_READ_BYTES // 16
    num_rows = 2 * most_rows + 3
    rows = b"".join(struct.pack("<fIIf", -float(place), place, 7, -0.5) for place in range(num_rows))
    messages = list(prompt_read(A, RowsRead(5, num_rows, rows, True), epoch=9))
    assert [(message.first_row, message.num_rows) for message in messages] == [
        (5, most_rows),
        (5 + most_rows, most_rows),
        (5 + 2 * most_rows, 3),
    ]
    received = [NODE_TO_ROUTER.decode(NODE_TO_ROUTER.encode(message)) for message in messages]
    found = [row for message in received for row in read_rows(message.values, message.num_rows)]
    assert [(row.logprob, row.rank) for row in found] == [(-float(place), place) for place in range(num_rows)]
    assert {(row.top_ids, row.top_logprobs) for row in found} == {((7,), (-0.5,))}


def test_forced_tokens_are_told_with_the_token_before_them() -> None:
    tokens = tuple(SampledToken(token_id, None) for token_id in (7, 8, 9))
    output = RequestOutput(A, 1, 9, 0, 4, tokens, "complete", True, has_failed=False, num_forced=2)
    event = token_event(output)
    assert event is not None
    assert (event.index, event.token_ids, event.finish_reason) == (4, (7, 8, 9), "complete")


def test_tiers_are_told_with_the_first_token_alone() -> None:
    output = RequestOutput(A, 1, 40, 32, 0, (SampledToken(7, None),), "", False, False, tiers=(TierTokens("host", 16),))
    events = [token_event(each) for each in (output, output._replace(output_index=1), output._replace(tiers=()))]
    assert [event and event.tiers for event in events] == [(TierTokens("host", 16),), None, None]


def test_the_draft_that_tokens_were_found_by_is_told_with_them() -> None:
    tokens = (SampledToken(7, None), SampledToken(8, None))
    output = RequestOutput(A, 4, 9, 0, 4, tokens, "", False, False, draft=VerifiedDraft("ngram", 3, 1))
    events = [token_event(each) for each in (output, output._replace(draft=None))]
    assert [event and event.draft for event in events] == [VerifiedDraft("ngram", 3, 1), None]


def test_a_grammar_that_one_node_cannot_compile_may_be_tried_at_another() -> None:
    failed = RequestOutput(A, 1, 9, 0, 4, (), "", False, has_failed=True, failure=OUT_OF_RESOURCES)
    assert isinstance(failure_of(failed), RequestFailed)
    assert isinstance(failure_of(failed._replace(failure=WORN_OUT)), RequestFailed)
    assert isinstance(failure_of(failed._replace(failure="a token does not fit")), InvalidRequest)
