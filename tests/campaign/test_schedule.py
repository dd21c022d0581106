"""The plan of a campaign: the same for the same seed, and there is always a decode node that could serve."""

from __future__ import annotations

import pytest

from tests.campaign.schedule import plan
from tests.campaign.settings import ALL_KINDS, STORE_KINDS, TIER_KINDS, parse


def test_the_same_seed_plans_the_same_faults_and_another_others() -> None:
    flags = ["--faults", "500", "--minutes", "20", "--transport", "nixl", "--tensor-parallel-size", "2", "--seed"]
    faults = plan(parse([*flags, "5"]), has_private_shm=True)
    assert faults == plan(parse([*flags, "5"]), has_private_shm=True)
    assert faults != plan(parse([*flags, "6"]), has_private_shm=True)
    assert len(faults) == 500
    assert {fault.kind for fault in faults} == set(ALL_KINDS) - set(TIER_KINDS) - set(STORE_KINDS)


def test_the_command_of_a_campaign_plans_it_again() -> None:
    settings = parse(
        [
            "--faults",
            "20",
            "--longest-s",
            "3",
            "--kinds",
            "kill,freeze",
            "--seed",
            "9",
            "--mixed",
            "--plaintext",
            "--structured",
            "0.5",
            "--clocks-lie",
            "--tiers",
            "valkey",
        ]
    )
    again = parse(settings.command.split()[3:])
    assert again == settings
    assert all(fault.lasts_s <= 3 for fault in plan(settings, has_private_shm=True))


def test_some_decode_node_is_left_alone_unless_all_are_killed_together() -> None:
    kinds = ",".join(kind for kind in ALL_KINDS if kind not in ("kill-together", "poison"))
    settings = parse(["--faults", "600", "--minutes", "20", "--layout", "2P3D", "--seed", "3", "--kinds", kinds])
    faults = plan(settings, has_private_shm=True)
    for fault in faults:
        hit = {
            other.target
            for other in faults
            if other.at_s <= fault.at_s <= other.at_s + other.lasts_s + settings.recovery_s
            and other.target.startswith("decode")
        }
        assert len(hit) < 3, str(fault)


def test_a_layout_is_told_or_drawn_from_the_seed() -> None:
    told = parse(["--layout", "4P3D"])
    assert (told.num_prefill, told.num_decode) == (4, 3)
    drawn = [parse(["--layout", "drawn", "--seed", str(seed)]) for seed in range(1, 60)]
    assert {(each.num_prefill, each.num_decode) for each in drawn} == {(p, d) for p in (2, 3, 4) for d in (2, 3, 4)}
    assert parse(drawn[0].command.split()[3:]) == drawn[0]
    for wrong in ("0P2D", "2P", "2D2P"):
        with pytest.raises(SystemExit):
            parse(["--layout", wrong])


def test_ranks_are_hit_where_there_are_some() -> None:
    faults = plan(parse(["--faults", "300", "--seed", "1"]), has_private_shm=True)
    assert not {"kill-rank", "freeze-rank"} & {fault.kind for fault in faults}


def test_without_a_key_links_lie_about_blocks_of_kv_alone() -> None:
    lies = ["--faults", "40", "--seed", "1", "--kinds", "flip,replay,kill"]
    for transport in ("zmq", "shm"):
        faults = plan(parse([*lies, "--plaintext", "--transport", transport]), has_private_shm=True)
        hit = {(fault.link, fault.target[:6]) for fault in faults if fault.kind != "kill"}
        assert hit == ({("peer", "decode")} if transport == "zmq" else set())
    with_key = plan(parse(lies), has_private_shm=True)
    assert {fault.link for fault in with_key if fault.kind != "kill"} == {"peer", "control"}


def test_the_shared_memory_of_the_machine_is_never_filled() -> None:
    faults = plan(parse(["--faults", "300", "--seed", "1"]), has_private_shm=False)
    assert "shm-full" not in {fault.kind for fault in faults}


def test_what_is_below_pools_is_hit_where_there_is_something() -> None:
    flags = ["--faults", "400", "--seed", "2", "--tiers"]
    plans = {name: plan(parse([*flags, name]), has_private_shm=True) for name in ("none", "disk", "valkey")}
    hit = {name: {fault.kind for fault in faults if fault.is_of_tiers} for name, faults in plans.items()}
    assert hit["none"] == set()
    assert hit["disk"] == set(TIER_KINDS)
    assert hit["valkey"] >= {*TIER_KINDS, *STORE_KINDS}
    assert {fault.target for fault in plans["valkey"] if fault.link == "store"} == {"tiers"}
    without_mounts = plan(parse([*flags, "disk"]), has_private_shm=False)
    assert "kv-read-only" not in {fault.kind for fault in without_mounts}
