from __future__ import annotations

from baton.runtime.draft_metrics import draft_metrics
from baton.wire.drafts import DraftsOfMethod


def test_tokens_are_counted_by_method_and_by_their_place_in_the_draft() -> None:
    ngrams, model = DraftsOfMethod("ngram", 4, (4, 3), (2, 1)), DraftsOfMethod("draft_model", 2, (2,), ())
    samples = [each for metric in draft_metrics(["node"], [("a", (ngrams, model))]) for each in metric.samples]
    found = {(each.name.removeprefix("baton:spec_decode_num_"), *each.labels.values()): each.value for each in samples}
    assert found == {
        ("drafts_total", "a", "ngram"): 4,
        ("drafts_total", "a", "draft_model"): 2,
        ("draft_tokens_total", "a", "ngram"): 7,
        ("draft_tokens_total", "a", "draft_model"): 2,
        ("accepted_tokens_total", "a", "ngram"): 3,
        ("accepted_tokens_total", "a", "draft_model"): 0,
        ("draft_tokens_per_pos_total", "a", "ngram", "0"): 4,
        ("draft_tokens_per_pos_total", "a", "ngram", "1"): 3,
        ("draft_tokens_per_pos_total", "a", "draft_model", "0"): 2,
        ("accepted_tokens_per_pos_total", "a", "ngram", "0"): 2,
        ("accepted_tokens_per_pos_total", "a", "ngram", "1"): 1,
    }
