"""`--kv-events-config`: vLLM's names, and where nodes listen."""

from __future__ import annotations

import json

import pytest

from baton.node.kv_events.config import listens, of_node, read_config
from baton.wire.errors import InvalidSetting

ON = {"enable_kv_cache_events": True}


def test_what_vllm_is_configured_with_is_understood() -> None:
    asked = {
        **ON,
        "publisher": "zmq",
        "endpoint": "tcp://*:5557",
        "replay_endpoint": "tcp://*:5560",
        "buffer_steps": 10,
        "hwm": 20,
        "max_queue_size": 30,
        "topic": "kv@10.0.0.1@model",
    }
    config = read_config(json.dumps(asked))
    assert config is not None
    assert {name: getattr(config, name) for name in asked} == asked


def test_what_is_not_said_is_as_in_vllm() -> None:
    config = read_config(json.dumps({**ON, "endpoint": "tcp://*:65535"}))
    assert config is not None
    assert (config.buffer_steps, config.hwm, config.max_queue_size, config.topic) == (10_000, 100_000, 100_000, "")


def test_nobody_hears_of_anything_unless_it_is_asked_for() -> None:
    for text in ("", "{}", '{"topic": "kv"}', json.dumps({**ON, "publisher": "null"})):
        assert read_config(text) is None
    config = read_config(json.dumps(ON))
    assert config is not None
    assert config.endpoint.startswith("tcp://127.0.0.1:")
    assert config.replay_endpoint is None


@pytest.mark.parametrize(
    "asked",
    [
        "[]",
        "{",
        {"endpoints": "tcp://*:1"},
        {"publisher": "nats"},
        {"endpoint": "5557"},
        {"endpoint": "ipc:///tmp/events"},
        {"endpoint": "tcp://*:65536"},
        {"replay_endpoint": "tcp://indexer:5558"},
        {"buffer_steps": 0},
        {"hwm": -1},
    ],
)
def test_anything_else_is_refused_in_one_sentence(asked: str | dict[str, object]) -> None:
    text = asked if isinstance(asked, str) else json.dumps({**ON, **asked})
    with pytest.raises(InvalidSetting, match=r"^--kv-events-config"):
        read_config(text)


@pytest.mark.parametrize(
    ("host", "is_here"),
    [
        ("*", True),
        ("127.0.0.1", True),
        ("localhost", True),
        ("[::1]", True),
        ("0.0.0.0", True),
        ("10.0.0.1", False),
        ("indexer.llm-d", False),
    ],
)
def test_an_endpoint_of_another_machine_is_dialled(host: str, is_here: bool) -> None:
    assert listens(f"tcp://{host}:5557") is is_here


def test_nodes_of_one_command_listen_at_ports_of_their_own() -> None:
    text = json.dumps({**ON, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://127.0.0.1:6557", "topic": "kv"})
    assert of_node(text, 0) == text
    moved = json.loads(of_node(text, 3))
    assert moved == {**json.loads(text), "endpoint": "tcp://*:5560", "replay_endpoint": "tcp://127.0.0.1:6560"}
    dialled = json.dumps({**ON, "endpoint": "tcp://indexer:5557"})
    assert json.loads(of_node(dialled, 3)) == json.loads(dialled)
    assert of_node("", 3) == ""
