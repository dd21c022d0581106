"""What is read from a router's metrics and nodes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from baton.launch.api_client import ApiClient
from baton.launch.cluster.readings import Look, RouterView, added_up, parse_look, quantile
from baton.router.health.metrics import RouterMetrics
from baton.wire.messages.membership import DECODE, PREFILL


def look(at_s: float, **times_s: list[float]) -> Look:
    """A look at a router that observed these times by then."""
    metrics = RouterMetrics(["a", "b"])
    for index, (name, values) in enumerate(times_s.items()):
        for value in values:
            getattr(metrics.of_model("ab"[index % 2]), name).observe(value)
    return parse_look(metrics.render().decode(), [node(PREFILL), node(DECODE, load=4), node(DECODE)], at_s)


def node(role: str, load: int = 0) -> dict[str, Any]:
    """As `/server_info` lists it."""
    return {
        "role": role,
        "load": load,
        "num_waiting": load,
        "num_running": load,
        "max_num_seqs": 8,
        "num_blocks": 100,
        "num_held_blocks": 10 * load,
    }


def view(*looks: Look) -> RouterView:
    made = RouterView([ApiClient("http://127.0.0.1:1")], window_s=10.0)
    for each in looks:
        made.add(each)
    return made


def test_a_reading_is_of_the_window_only() -> None:
    old, new = [0.9] * 50, [0.9] * 50 + [0.05] * 50
    reading = view(look(0.0, queue_time=old), look(4.0, queue_time=old), look(10.0, queue_time=new)).reading()
    assert reading is not None
    assert reading.queue_s is not None
    assert reading.queue_s < 0.1, "what came before was slow"
    assert reading.ttft_s is None, "nobody measured any"


def test_there_is_no_reading_before_the_window_is_full() -> None:
    assert view().reading() is None
    assert view(look(0.0), look(9.0)).reading() is None


def test_looks_that_are_too_old_leave_the_window() -> None:
    seen = view(*(look(float(second)) for second in range(0, 100, 5)))
    reading = seen.reading()
    assert reading is not None
    assert reading.window_s == 10.0


def test_a_router_that_was_started_anew_begins_a_window() -> None:
    seen = view(look(0.0, queue_time=[1.0] * 5), look(10.0, queue_time=[1.0] * 9), look(11.0, queue_time=[1.0]))
    assert seen.reading() is None


def test_loads_are_means_over_the_window_by_role() -> None:
    reading = view(look(0.0), look(10.0)).reading()
    assert reading is not None
    assert (reading.prefill.num_requests, reading.prefill.num_busy) == (0.0, 0.0)
    assert (reading.decode.num_requests, reading.decode.num_busy) == (4.0, 1.0)
    assert (reading.decode.kv_share, reading.decode.seqs_share) == (0.2, 0.25)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({1.0: 0, 2.0: 10, math.inf: 10}, 1.9),
        ({1.0: 100, 2.0: 100, math.inf: 100}, 0.9),
        ({1.0: 5, 2.0: 5, math.inf: 10}, 2.0),
        ({1.0: 0, math.inf: 0}, None),
        ({}, None),
    ],
)
def test_a_quantile_lies_within_its_bucket(counts: dict[float, float], expected: float | None) -> None:
    found = quantile(counts)
    assert found == (None if expected is None else pytest.approx(expected))


def test_the_histograms_of_all_models_are_one() -> None:
    both = look(0.0, queue_time=[0.2], time_to_first_token=[0.2])
    assert both.histograms["baton:request_queue_time_seconds"][math.inf] == 1
    assert both.histograms["baton:time_to_first_token_seconds"][math.inf] == 1


def test_what_several_routers_counted_is_added_up_and_a_node_counts_once() -> None:
    first, second = look(1.0, queue_time=[0.2] * 3), look(1.0, queue_time=[0.2])
    nodes = [{**node(DECODE, load=2), "id": "decode-0"}, {**node(PREFILL), "id": "prefill-0"}]
    both = added_up([replace(first, nodes=nodes, num_held_back=1.0), replace(second, nodes=nodes, num_held_back=2.0)])
    assert both.histograms["baton:request_queue_time_seconds"][math.inf] == 4
    assert both.nodes == nodes
    assert (both.at_s, both.num_held_back) == (1.0, 3.0)
