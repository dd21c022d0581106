"""`--data-parallel-size`: what the nodes of a group have of their own."""

from __future__ import annotations

import json

import pytest

from baton.launch.cli import main
from baton.launch.node_group import PORTS_OF_A_NODE, engine_specs
from baton.node.settings import MixedNodeSettings, NodeSettings


def test_each_node_of_a_group_has_a_name_ports_and_a_share_of_its_own() -> None:
    settings = NodeSettings(
        data_parallel_size=2,
        node_id="rack",
        port=9000,
        http_port=8080,
        cluster_key="k",
        cpu_memory_utilization=0.5,
        kv_events_config='{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}',
    )
    environment = {"CUDA_VISIBLE_DEVICES": "4,6", "BATON_NODE_ID": "x", "HOME": "/root"}
    specs = engine_specs("baton.decode_node", "rack", settings, environment)
    assert [(spec.name, spec.module, spec.group) for spec in specs] == [
        ("rack-0", "baton.decode_node", "rack"),
        ("rack-1", "baton.decode_node", "rack"),
    ]
    first, second = (dict(flag.partition("=")[::2] for flag in spec.arguments) for spec in specs)
    assert (second["--node-id"], second["--node-group"]) == ("rack-1", "rack")
    assert (first["--port"], second["--port"]) == ("9000", str(9000 + PORTS_OF_A_NODE))
    assert (first["--http-port"], second["--http-port"]) == ("8080", "8081")
    assert json.loads(second["--kv-events-config"])["endpoint"] == "tcp://*:5558"
    assert second["--cpu-memory-utilization"] == "0.25"
    assert "--data-parallel-size" not in second
    assert [spec.environment["CUDA_VISIBLE_DEVICES"] for spec in specs] == ["4", "6"]
    assert all("BATON_NODE_ID" not in spec.environment and spec.reloads for spec in specs)


def test_an_address_with_a_password_reaches_the_nodes_by_their_environment() -> None:
    settings = NodeSettings(data_parallel_size=2, kv_store="valkey", kv_store_url="redis://:horse@127.0.0.1/0")
    specs = engine_specs("baton.decode_node", "rack", settings, {"BATON_KV_STORE_URL": "another"})
    assert [spec.environment["BATON_KV_STORE_URL"] for spec in specs] == [settings.kv_store_url] * 2
    assert not any("horse" in argument for spec in specs for argument in spec.arguments)


def test_a_group_of_mixed_nodes_prefers_what_it_was_told_and_a_name_of_several_groups_stays() -> None:
    settings = MixedNodeSettings(data_parallel_size=3, role="prefill", node_group="hall")
    specs = engine_specs("baton.node", "rack", settings, {})
    assert [spec.name for spec in specs] == ["rack-0", "rack-1", "rack-2"]
    assert all({"--role=prefill", "--node-group=hall"} <= set(spec.arguments) for spec in specs)
    assert not any(flag.startswith(("--port", "--http-port")) for spec in specs for flag in spec.arguments)


@pytest.mark.parametrize("command", ["prefill", "decode", "node", "serve"])
def test_a_group_of_no_nodes_is_refused_in_one_line(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--data-parallel-size=0"]) == 2
    assert capsys.readouterr().err == "error: --data-parallel-size: 0 is not from 1 to 256\n"
