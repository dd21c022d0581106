from __future__ import annotations

from baton.engine.scheduler.draft_counts import DraftCounts
from baton.wire.drafts import MAX_POSITIONS, DraftsOfMethod


def test_each_method_has_its_tokens_by_their_place_in_the_draft() -> None:
    counts = DraftCounts()
    counts.verified("ngram", 3, 1)
    counts.verified("ngram", 1, 0)
    counts.verified("prediction", 2, 2)
    assert counts.by_method() == (
        DraftsOfMethod("ngram", 2, (2, 1, 1), (1,)),
        DraftsOfMethod("prediction", 1, (1, 1), (1, 1)),
    )


def test_a_draft_of_any_length_fits_into_what_a_router_is_told() -> None:
    counts = DraftCounts()
    counts.verified("prediction", MAX_POSITIONS + 1, MAX_POSITIONS + 1)
    (found,) = counts.by_method()
    assert len(found.tokens_by_position) == len(found.accepted_by_position) == MAX_POSITIONS
