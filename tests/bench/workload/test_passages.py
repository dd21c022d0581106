from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import models

from baton.bench.workload.passages import Vocabulary, lengths_around, vocabulary_of
from tests.bench.workload.conftest import OPENING_ID


def test_lengths_are_uniform_between_both_bounds() -> None:
    counts = Counter(lengths_around(10, 0.25, 8000, 1, np.random.default_rng(0)))
    assert sorted(counts) == list(range(7, 14))  # floor(7.5) to ceil(12.5)
    assert max(counts.values()) < 1.25 * min(counts.values())


def test_words_come_back_as_themselves_wherever_they_stand(words: Vocabulary) -> None:
    assert words.tokenizer is not None
    assert len(words.drawn_ids) >= 256
    for seed in range(20):
        ids = np.random.default_rng(seed).choice(words.drawn_ids, size=300).tolist()
        assert words.tokenizer.encode(words.text_of(ids), add_special_tokens=False) == ids


def test_of_few_words_there_is_no_text_and_no_special_id_is_drawn(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({" word": 0, "x": 1, "<end>": 2, "y": 3}, unk_token="x"))
    backend.add_special_tokens(["<end>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"eos_token_id": 3}')
    found = vocabulary_of(tmp_path)
    assert found.drawn_ids == (0, 1)
    assert found.text_of([0, 1]) == ""


def test_the_opening_is_what_a_text_gets_in_front(words: Vocabulary, opened: Vocabulary) -> None:
    assert words.opening_ids == ()
    assert opened.opening_ids == (OPENING_ID,)
