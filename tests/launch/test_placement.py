from __future__ import annotations

from pathlib import Path

import pytest

from baton.engine.native.loans import Lending
from baton.launch.placement import Cpus, Placement, find_cpus, find_devices, lendings, place_nodes


def cpus(num_cpus: int, num_usable: int | None = None) -> Cpus:
    return Cpus(tuple(range(10, 10 + num_cpus)), num_cpus if num_usable is None else num_usable)


def test_nodes_split_the_cores_and_share_none() -> None:
    assert place_nodes(2, cpus(5), [], pin_cpus=True) == [Placement(2, (10, 11)), Placement(2, (12, 13))]


def test_more_nodes_than_cores_are_not_pinned() -> None:
    assert place_nodes(3, cpus(2), [], pin_cpus=True) == [Placement(1)] * 3


def test_pinning_can_be_turned_off() -> None:
    assert place_nodes(2, cpus(4), [], pin_cpus=False) == [Placement(2)] * 2


def test_a_quota_limits_threads_and_leaves_the_choice_of_cores_to_the_kernel() -> None:
    assert place_nodes(2, cpus(64, num_usable=4), [], pin_cpus=True) == [Placement(2)] * 2


def test_several_accelerators_are_given_out_in_turn() -> None:
    shares = place_nodes(3, cpus(3), ["0", "1"], pin_cpus=False)
    assert [share.device for share in shares] == ["0", "1", "0"]


def test_a_single_accelerator_is_left_to_every_node() -> None:
    assert [share.device for share in place_nodes(2, cpus(2), ["0"], pin_cpus=False)] == ["", ""]


@pytest.mark.parametrize(
    ("num_nodes", "devices", "expected"),
    [(2, [], [1, 1]), (2, ["0"], [2, 2]), (3, ["0", "1"], [2, 1, 2]), (2, ["0", "1", "2"], [1, 1])],
)
def test_nodes_know_how_many_share_their_accelerator(num_nodes: int, devices: list[str], expected: list[int]) -> None:
    shares = place_nodes(num_nodes, cpus(4), devices, pin_cpus=False)
    assert [share.num_sharing for share in shares] == expected


def test_each_rank_of_a_node_has_an_accelerator_of_its_own() -> None:
    shares = place_nodes(3, cpus(4), ["0", "1", "2", "3"], pin_cpus=False, num_ranks=[2, 1, 2])
    assert [(share.device, share.num_sharing) for share in shares] == [("0,1", 2), ("2", 1), ("3,0", 2)]
    # with too few a node sees all of them, and refuses
    shares = place_nodes(1, cpus(4), ["4", "5"], pin_cpus=False, num_ranks=[4])
    assert [share.device for share in shares] == ["4,5"]


@pytest.mark.parametrize(("text", "num_cpus"), [("100000 100000", 1), ("50000 100000", 1), ("max 100000", None)])
def test_a_cgroup_quota_is_respected(tmp_path: Path, text: str, num_cpus: int | None) -> None:
    file = tmp_path / "cpu.max"
    file.write_text(text)
    found = find_cpus(file)
    assert found.num_usable == (num_cpus or len(found.ids))


def test_devices_come_from_the_environment_before_the_machine(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert find_devices({}, tmp_path) == ["0", "1"]
    assert find_devices({"CUDA_VISIBLE_DEVICES": "3,5"}, tmp_path) == ["3", "5"]
    assert find_devices({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == []


def test_prefill_and_decode_nodes_lend_each_other_their_cores() -> None:
    prefill, decode = lendings(["prefill", "decode"], [Placement(2, (0, 1)), Placement(2, (2, 3))], 7)
    assert prefill == Lending(7, 0, (), ((2, 1), (3, 1)))
    assert decode == Lending(7, 1, (0,), ((0, 0), (1, 0)))


@pytest.mark.parametrize(("num_prefill", "num_decode"), [(1, 3), (3, 1), (2, 2), (3, 2)])
def test_each_core_is_lent_to_one_node_of_the_other_kind(num_prefill: int, num_decode: int) -> None:
    roles = ["prefill"] * num_prefill + ["decode"] * num_decode
    told = lendings(roles, [Placement(1, (10 + number,)) for number in range(len(roles))], 7)
    guests = sorted(guest for each in told for guest in each.guests)
    assert guests == [(10 + number, number) for number in range(len(roles))]
    for role in ("prefill", "decode"):
        counts = [len(each.guests) for each in told if roles[each.line] == role]
        assert max(counts) - min(counts) <= 1
    for each in told:
        assert all(roles[lender] != roles[each.line] for _, lender in each.guests)
        assert all(each.line in [line for _, line in told[other].guests] for other in each.rests_for)
