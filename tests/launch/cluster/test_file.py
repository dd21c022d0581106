"""The file of a deployment: what it says, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from baton.launch.cluster.file import Scaling, parse_cluster_file, read_cluster_file
from baton.launch.cluster.programs import Ports, node_program, router_program
from baton.launch.layout import Layout
from baton.wire.errors import InvalidSetting
from baton.wire.messages.membership import DECODE
from tests.system.harness import ROOT

EXAMPLE = ROOT / "examples/cluster.toml"


def test_the_example_is_a_deployment_that_scales() -> None:
    file, text = read_cluster_file(EXAMPLE)
    assert (file.name, file.backend, file.listens_on_machine) == ("baton", "ray", False)
    assert (file.ttft_goal_s, file.tpot_goal_s) == (0.5, 0.05)
    assert [(group.minimum, group.maximum, group.count) for group in file.groups.values()] == [(1, 2, 1), (1, 3, 1)]
    assert (file.router.port, file.router.node_wait_s, file.router.goal_ttft_ms) == (8000, 60.0, 500.0)
    assert (file.decode.settings.max_num_seqs, file.decode.settings.goal_tpot_ms) == (32, 50.0)
    assert parse_cluster_file(text, "it") == file


def test_the_same_file_describes_one_machine() -> None:
    deployment = read_cluster_file(EXAMPLE)[0].on_one_machine()
    assert deployment.layout == Layout(1, 1)
    assert deployment.router.port == 8000
    assert deployment.decode.max_num_seqs == 32
    assert parse_cluster_file("[router]\ncount = 3", "it").on_one_machine().serve.routers == 3


def test_an_empty_file_is_one_node_of_each_role() -> None:
    file = parse_cluster_file("", "it")
    assert [group.count for group in file.groups.values()] == [1, 1]
    assert file.scaling == Scaling()


@pytest.mark.parametrize(
    ("numbers", "bounds"),
    [
        ("count = 3", (3, 3, 3)),
        ("min = 2", (2, 2, 2)),
        ("max = 4", (1, 4, 1)),
        ("count = 2\nmax = 4", (2, 4, 2)),
        ("min = 1\nmax = 4\ncount = 3", (1, 4, 3)),
    ],
)
def test_bounds_that_are_left_out_follow_from_the_others(numbers: str, bounds: tuple[int, int, int]) -> None:
    group = parse_cluster_file(f"[goals]\ntpot_ms = 9\n[decode]\n{numbers}", "it").decode
    assert (group.minimum, group.maximum, group.count) == bounds


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nmae = 'x'", "it: Object contains unknown field `nmae`"),
        ("[decode]\ncount = 0", r"it: \[decode\]: min must be at least 1"),
        ("[decode]\nmin = 3\nmax = 2", "count 3 is not between min 3 and max 2"),
        ("[decode]\nmin = 1\nmax = 2", "min 1 and max 2 differ, and goals.tpot_ms does not say what to reach"),
        ("[prefill]\nmin = 1\nmax = 2", "and goals.ttft_ms does not say"),
        ("[decode]\ncount = '2'", r"Expected `int \| null`, got `str` - at `\$.decode.count`"),
        (
            "[decode.flags]\nmax-num-seq = 4",
            r"it: \[decode\] flags: unknown flag 'max-num-seq': did you mean max-num-seqs",
        ),
        ("[decode.flags]\nmax-num-seqs = 'many'", r"it: \[decode\] flags: --max-num-seqs: 'many' is not of type int"),
        ("[decode.flags]\nnode-id = 'me'", "unknown flag 'node-id'"),
        ("[router.flags]\ncluster-key = 'file'", "unknown flag 'cluster-key'"),
        ("[router.flags]\ngoal-ttft-ms = 3", "unknown flag 'goal-ttft-ms'"),
        ("[router]\nresources = { CPU = 0 }", r"\[router\] resources: 'CPU' = 0.0 must be positive"),
        ("[router]\ncount = 17", "Expected `int` <= 16 - at `\\$.router.count`"),
        (
            "[router]\ncount = 2\nflags = { resumable-streams-s = 9 }",
            r"it: \[router\]: resumable-streams-s needs count",
        ),
        ("[decode]\nmachines = 0", "Expected `int` >= 1 - at `\\$.decode.machines`"),
        ("[decode]\nmachines = 2", r"it: \[decode\]: machines = 2: 1 ranks are not spread equally over them"),
        (
            "[decode]\nmachines = 2\nflags = { tensor-parallel-size = 2, data-parallel-size = 2 }",
            "machines = 2: the nodes of data-parallel-size share one machine",
        ),
        ("[decode.flags]\nrank-machines = 2", "unknown flag 'rank-machines'"),
        ("[decode]\nresources = { CPU = inf }", "must be positive"),
        ("[decode]\nresources = {}", "name at least one"),
        ("name = '../x'", "use 1 to 64 letters"),
        ("name = 3 4", "it: Expected newline"),
        ("backend = 'slurm'", "Invalid enum value 'slurm'"),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_place(text: str, message: str) -> None:
    with pytest.raises(InvalidSetting, match=message):
        parse_cluster_file(text, "it")


def test_what_one_of_several_routers_stores_in_its_memory_is_not_looked_for_at_another() -> None:
    stores = {text: parse_cluster_file(text, "it").router.responses_store_bytes for text in (
        "[router]\ncount = 1", "[router]\ncount = 2", "[router]\ncount = 2\nflags = { responses-store = '/x' }",
    )}  # fmt: skip
    assert [bool(num_bytes) for num_bytes in stores.values()] == [True, False, True]


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match=r"cannot read .*none.toml"):
        read_cluster_file(tmp_path / "none.toml")


def test_a_node_is_told_its_name_its_router_and_its_share_of_a_machine() -> None:
    file = parse_cluster_file(
        "environment = { HF_HOME = '/models' }\n[decode]\nresources = { CPU = 3, GPU = 0.5 }", "it"
    )
    program = node_program(file, file.groups[DECODE], "decode-4", ["tcp://10.0.0.1:8001"])
    assert program.module == "baton.decode_node"
    assert {"--node-id=decode-4", "--router=tcp://10.0.0.1:8001", "--num-threads=3"} <= set(program.arguments)
    assert "--gpu-memory-utilization=0.45" in program.arguments
    assert program.resources == {"CPU": 3.0, "GPU": 0.5}
    assert program.environment == {"HF_HOME": "/models"}
    assert program.host_flags == (), "on loopback unless the file says otherwise"


def test_all_ranks_of_a_node_have_one_place() -> None:
    text = "[decode]\nresources = { CPU = 3, GPU = 1 }\nflags = { tensor-parallel-size = 2 }"
    file = parse_cluster_file(text, "it")
    program = node_program(file, file.groups[DECODE], "decode-0", ["tcp://h:1"])
    assert program.resources == {"CPU": 6.0, "GPU": 2.0}
    assert {"--tensor-parallel-size=2", "--num-threads=6"} <= set(program.arguments)


def test_the_ranks_of_a_node_are_spread_over_machines() -> None:
    text = """
    listen = "machine"
    [decode]
    machines = 2
    resources = { CPU = 3 }
    flags = { tensor-parallel-size = 2, pipeline-parallel-size = 2, shutdown-timeout-s = 7 }
    """
    file = parse_cluster_file(text, "it")
    program = node_program(file, file.groups[DECODE], "decode-0", ["tcp://h:1"])
    assert {"--rank-machines=2", "--num-threads=6", "--pipeline-parallel-size=2"} <= set(program.arguments)
    assert (program.resources, program.wait_flag) == ({"CPU": 6.0}, "--rank-port")
    (other,) = program.further
    assert (other.name, other.module, other.dial_flag) == ("decode-0/1", "baton.ranks.command", "--driver")
    assert {"--num-threads=6", "--shutdown-timeout-s=7.0"} <= set(other.arguments)
    assert other.host_flags == ("--host",)
    assert file.on_one_machine().decode.rank_machines == 1, "one machine has all of them"


def test_a_group_of_nodes_has_one_place_and_is_one_program() -> None:
    text = "[decode]\nresources = {{ CPU = 3, GPU = 0.5 }}\nflags = {{ data-parallel-size = {} }}"
    file = parse_cluster_file(text.format(2), "it")
    program = node_program(file, file.groups[DECODE], "decode-0", ["tcp://h:1"])
    assert (program.module, program.arguments[0]) == ("baton", "decode")
    assert program.resources == {"CPU": 6.0, "GPU": 1.0}
    assert {"--data-parallel-size=2", "--num-threads=3", "--node-id=decode-0"} <= set(program.arguments)
    assert not any("gpu-memory" in flag for flag in program.arguments), "the group divides its GPU by itself"
    with pytest.raises(InvalidSetting, match=r"it: \[decode\] flags: --data-parallel-size: 0 is not from 1 to 256"):
        parse_cluster_file(text.format(0), "it")


def test_a_router_listens_where_the_file_says() -> None:
    text = "listen = '{}'\n[router.flags]\nhost = '{}'\nallow-unauthenticated = true"
    file = parse_cluster_file(text.format("machine", "0.0.0.0"), "it")
    program = router_program(file, "router", Ports(9000, 9001))
    assert {"--host=0.0.0.0", "--port=9000", "--control-port=9001"} <= set(program.arguments)
    assert program.host_flags == ("--control-host",)
    assert router_program(parse_cluster_file("listen = 'machine'", "it"), "router", Ports(1, 2)).host_flags == (
        "--control-host",
        "--host",
    )
    assert router_program(parse_cluster_file("", "it"), "router", Ports(1, 2)).host_flags == ()


def test_nothing_that_a_program_is_told_is_a_key() -> None:
    file, _ = read_cluster_file(EXAMPLE)
    node = node_program(file, file.groups[DECODE], "decode-0", ["tcp://h:1"])
    programs = [router_program(file, "router", Ports(1, 2)), node]
    assert not any("key" in argument for program in programs for argument in program.arguments)
    assert "cluster_key" in {field.name for field in dataclasses.fields(file.router)}
