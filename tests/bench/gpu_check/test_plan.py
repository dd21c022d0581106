from __future__ import annotations

import pytest

from bench.gpu_check.attention_cases import BATCHES, BLOCK_SIZES, DTYPES, GROUPS, HEAD_SIZES, WINDOWS, attention_cases
from bench.gpu_check.plan import all_groups, chosen_groups
from wire.errors import InvalidSetting

EIGHT_MINUTES_S = 480


@pytest.mark.parametrize("quick", [False, True])
def test_all_groups_together_end_within_eight_minutes(quick: bool) -> None:
    limits_s = [group.limit_s(quick=quick) for group in all_groups(quick=quick)]
    assert sum(limits_s) < EIGHT_MINUTES_S
    assert min(limits_s) >= 20


def test_the_plan_covers_the_whole_path() -> None:
    checks = {group.name: [check.name for check in group.checks] for group in all_groups(quick=False)}
    assert set(checks["attention"]) == {
        "bfloat16/64",
        "bfloat16/128",
        "float16/64",
        "float16/128",
        "graph plans",
    }
    assert set(checks["served"]) == {"auto", "shm", "zmq", "nixl", "nccl", "divergence"}
    assert set(checks["transfer"]) == {"shm", "zmq", "nixl", "nccl"}
    for name in ("decode", "prefill", "throughput"):
        assert checks[name][:2] == ["8B", "0.6B"]
    assert checks["device"] == ["checksum", "sampler"]
    assert {"operations", "graphs", "exposed"} <= checks.keys()


def test_the_grid_of_attention_has_every_combination_once() -> None:
    wanted = {(g, s, b) for g in (1, 4, 7, 8) for s in (16, 32, 64) for b in ("decode", "prefill", "prefix", "mixed")}
    cases = attention_cases(quick=False)
    assert {(case.group, case.block_size, case.batch) for case in cases} == wanted
    assert len(cases) == len(wanted) == 48
    assert set(DTYPES) == {"bfloat16", "float16"}
    assert set(HEAD_SIZES) == {64, 128}
    assert None in WINDOWS
    assert any(window is not None for window in WINDOWS)


def test_the_quick_grid_keeps_every_group_block_size_and_batch() -> None:
    cases = attention_cases(quick=True)
    assert {(case.group, case.batch) for case in cases} == {(group, batch) for group in GROUPS for batch in BATCHES}
    assert {(case.block_size, case.batch) for case in cases} == {(s, batch) for s in BLOCK_SIZES for batch in BATCHES}


def test_every_check_of_attention_asks_for_its_whole_grid() -> None:
    for quick in (False, True):
        attention = next(group for group in all_groups(quick=quick) if group.name == "attention")
        grids = [check.num_cases for check in attention.checks if check.name != "graph plans"]
        assert grids == [len(attention_cases(quick=quick))] * len(DTYPES) * len(HEAD_SIZES)


@pytest.mark.parametrize("case", attention_cases(quick=False), ids=str)
def test_batches_reach_the_borders_of_blocks(case: object) -> None:
    from bench.gpu_check.attention_cases import AttentionCase

    assert isinstance(case, AttentionCase)
    shares = case.shares()
    assert all(share.num_tokens >= 1 and share.num_shared <= share.start for share in shares)
    assert all(share.num_shared % case.block_size == 0 for share in shares)
    contexts = {share.start + share.num_tokens for share in shares}
    if case.batch in ("decode", "mixed"):
        assert {case.block_size, case.block_size - 1} <= contexts
        assert any(share.num_tokens == 1 for share in shares)
    if case.batch in ("prefix", "mixed"):
        assert sum(share.num_shared > 0 for share in shares) >= 2
    if case.batch in ("prefill", "mixed"):
        assert any(share.start == 0 and share.num_tokens > case.block_size for share in shares)


def test_groups_are_chosen_by_name() -> None:
    assert [group.name for group in chosen_groups("graphs, attention", quick=True)] == ["attention", "graphs"]
    assert len(chosen_groups("", quick=True)) == len(all_groups(quick=True))
    with pytest.raises(InvalidSetting, match="'speed' is not one of attention"):
        chosen_groups("speed", quick=True)
