from __future__ import annotations

import pytest
from bench.workload.prefix_blocks import prompt_ids, reuse_share, runs_of_blocks

from bench.workload.vocabulary import bare_vocabulary
from wire.errors import InvalidSetting


def test_the_reuse_share_counts_unbroken_prefixes_only() -> None:
    assert reuse_share([(0, 1, 2), (0, 1, 3), (0, 1, 2), (5, 1)]) == 5 / 11
    assert reuse_share([(7,), (7,), (7,)]) == 2 / 3


def test_runs_differ_even_where_few_are_possible() -> None:
    runs = runs_of_blocks([range(8)], 3, bare_vocabulary(2), seed=0)
    assert len(set(runs.values())) == 8
    with pytest.raises(InvalidSetting, match="a block length of 3, too short for 9 different blocks of 2 tokens"):
        runs_of_blocks([range(9)], 3, bare_vocabulary(2), seed=0)


def test_runs_depend_on_the_seed_and_on_where_ids_come_first() -> None:
    vocabulary = bare_vocabulary(1000)
    short = runs_of_blocks([(4, 2)], 16, vocabulary, seed=0)
    long = runs_of_blocks([(4, 2), (4, 9, 10**30)], 16, vocabulary, seed=0)
    assert {block_id: long[block_id] for block_id in (4, 2)} == short
    assert runs_of_blocks([(4, 2)], 16, vocabulary, seed=1) != short


def test_a_prompt_is_cut_within_its_last_run() -> None:
    assert prompt_ids([3, 1], {1: (7, 8), 3: (5, 6)}, 3) == (5, 6, 7)
