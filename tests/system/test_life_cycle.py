"""Programs that die, leave and come back while requests run: each stream continues exactly or ends with an error."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from tests.checkpoints import make_checkpoint
from tests.system.conftest import running
from tests.system.harness import MODEL_NAME, Node, Program, Relay, start_relay, wait_until
from tests.system.reference import Reference, make_prompt

References = Callable[[str], Reference]
SLOW_PREFILL = str(Path(__file__).with_name("slow_prefill.py"))
NODE_FLAGS = ("--lease-s", "3")
LONG = 300
MOVED = 1000
"""Takes longer than asking for a move."""
VERY_LONG = 3900
NUM_SLOW = 8
"""So many tokens of so many requests take longer than restarting a router."""


@pytest.fixture(scope="module")
def relay(relays: list[Relay], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Relay]:
    """A relay whose members change; each test asks for those it needs with `ensure`. The weights are those of the
    checkpoint "llama", for longer contexts."""
    started = start_relay(
        make_checkpoint(tmp_path_factory.mktemp("long"), "llama", max_position=4096),
        tmp_path_factory.mktemp("life-cycle"),
        prefill=(NODE_FLAGS,),
        decode=(NODE_FLAGS, NODE_FLAGS),
        router=("--local-prefill-tokens", "0", "--node-wait-s", "0"),
    )
    yield from running(started, relays)


def ensure(relay: Relay, *, prefill: int, decode: int) -> None:
    """Bring the relay to that many nodes."""
    for nodes, count in ((relay.prefills, prefill), (relay.decodes, decode)):
        for node in nodes[count:]:
            relay.nodes.remove(node)
            node.stop()
    launched = [relay.launch("prefill", *NODE_FLAGS) for _ in range(prefill - len(relay.prefills))]
    launched += [relay.launch("decode", *NODE_FLAGS) for _ in range(decode - len(relay.decodes))]
    relay.join(*launched)
    relay.wait_for_members()


def delivered(relay: Relay) -> int:
    """Handoffs that arrived, over all decode nodes."""
    return sum(node.metrics().value("kv_receive_delivered_total") for node in relay.decodes)


def busy_decode(relay: Relay) -> Node:
    """The decode node that generates now."""
    busy = [node for node in relay.decodes if node.metrics().value("num_requests_running")]
    assert len(busy) == 1
    return busy[0]


def drain(relay: Relay, node: Node) -> None:
    """Ask the router to take a node out of service."""
    body = json.dumps({"node": node.name, "restart": False}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{relay.router.address}/admin/drain", body, headers)
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert json.load(answer)["node"] == node.name


def test_a_node_whose_last_port_cannot_be_ends_with_one_line(relay: Relay) -> None:
    node = relay.launch("decode", "--kv-transport=shm", "--port=65535")
    assert node.wait_exit() == 2
    assert "Traceback" not in node.err
    assert node.err.splitlines()[-1].startswith("error: cannot listen on 127.0.0.1:65536: ")
    node.require_nothing_left()


def test_a_killed_prefill_node_is_replaced(relay: Relay, references: References) -> None:
    ensure(relay, prefill=1, decode=2)
    relay.drop(relay.prefills[0])
    before = delivered(relay)
    prompts = [make_prompt(60 + index, 100 + index) for index in range(3)]
    assert relay.ask(prompts[0]).token_ids == references("llama").greedy(prompts[0]).token_ids
    assert delivered(relay) == before
    relay.add("prefill", *NODE_FLAGS)
    assert relay.ask(prompts[1]).token_ids == references("llama").greedy(prompts[1]).token_ids
    assert delivered(relay) == before + 1


def test_a_prefill_node_killed_without_notice_costs_no_request(relay: Relay, references: References) -> None:
    ensure(relay, prefill=1, decode=2)
    node = relay.prefills[0]
    relay.nodes.remove(node)
    node.kill()
    prompt = make_prompt(90, 150)
    assert relay.ask(prompt).token_ids == references("llama").greedy(prompt).token_ids


def test_a_stream_continues_exactly_when_its_decode_node_is_killed(relay: Relay, references: References) -> None:
    ensure(relay, prefill=1, decode=2)
    prompt = make_prompt(75, 200)
    with relay.open(prompt, LONG, logprobs=0) as stream:
        stream.read(5)
        victim = busy_decode(relay)
        relay.nodes.remove(victim)
        victim.kill()
        stream.read_all()
    answer = stream.answer()
    expected = references("llama").greedy(prompt, LONG, answer.token_ids)
    assert answer.token_ids == expected.token_ids
    assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    assert answer.finish_reason == "length"
    relay.add("decode", *NODE_FLAGS)
    victim.require_nothing_left()  # the next decode node has swept the segment


def test_a_sampled_stream_continues_exactly_when_its_decode_node_is_killed(relay: Relay) -> None:
    ensure(relay, prefill=1, decode=2)
    prompt = make_prompt(66, 210)
    undisturbed = relay.ask(prompt, LONG, temperature=0.9, seed=7)
    with relay.open(prompt, LONG, temperature=0.9, seed=7) as stream:
        stream.read(5)
        victim = busy_decode(relay)
        relay.nodes.remove(victim)
        victim.kill()
        stream.read_all()
    assert stream.answer().token_ids == undisturbed.token_ids


def test_a_structured_stream_continues_exactly_when_its_decode_node_is_killed(relay: Relay) -> None:
    ensure(relay, prefill=1, decode=2)
    pattern = "([a-z]{3} [0-9]{2}[,;]){40}"
    options: dict[str, Any] = {"temperature": 1.5, "seed": 7, "extra_body": {"structured_outputs": {"regex": pattern}}}
    prompt = make_prompt(66, 220)
    undisturbed = relay.ask(prompt, LONG, **options)
    assert re.fullmatch(pattern, undisturbed.text)
    with relay.open(prompt, LONG, **options) as stream:
        stream.read(5)
        victim = busy_decode(relay)
        relay.nodes.remove(victim)
        victim.kill()
        stream.read_all()
    assert (stream.answer().text, stream.answer().finish_reason) == (undisturbed.text, "stop")


def test_a_drained_decode_node_hands_its_streams_over_and_ends(relay: Relay) -> None:
    ensure(relay, prefill=1, decode=2)
    prompt = make_prompt(75, 230)
    undisturbed = relay.ask(prompt, MOVED, temperature=0.9, seed=7)
    num_retries = relay.router.metrics().value("relay_retries_total")
    with relay.open(prompt, MOVED, temperature=0.9, seed=7) as stream:
        stream.read(5)
        leaving = busy_decode(relay)
        relay.nodes.remove(leaving)
        (other,) = relay.decodes
        names = ("computed_tokens_total", "generation_tokens_total")
        before = [other.metrics().value(name) for name in names]
        drain(relay, leaving)
        stream.read_all()
    assert stream.answer().token_ids == undisturbed.token_ids
    assert leaving.wait_exit(10) == 0
    leaving.require_nothing_left()
    computed, generated = (other.metrics().value(name) - count for name, count in zip(names, before, strict=True))
    assert computed == generated > 0, "no token of the stream was computed again"
    metrics = relay.router.metrics()
    assert (metrics.value("relay_moves_total"), metrics.value("relay_retries_total")) == (1, num_retries)


def test_without_another_decode_node_the_stream_ends_with_an_error(relay: Relay) -> None:
    ensure(relay, prefill=1, decode=1)
    body = {
        "model": MODEL_NAME,
        "prompt": list(make_prompt(80, 300)),
        "max_tokens": 400,
        "stream": True,
        "ignore_eos": True,
    }
    events: list[str] = []
    connection = http.client.HTTPConnection(urlsplit(relay.router.address).netloc, timeout=20)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        with connection.getresponse() as answer, contextlib.suppress(http.client.HTTPException, ConnectionError):
            while line := answer.readline():  # breaks off or just ends: it must not look finished
                events += [line.decode().strip()] if line.strip() else []
                if len(events) == 5 and relay.decodes:
                    relay.decodes[0].kill()
                    relay.nodes.remove(relay.decodes[0])
    assert "data: [DONE]" not in events
    assert "error" in json.loads(events[-1].removeprefix("data: "))
    relay.wait_for_members()
    with pytest.raises(openai.InternalServerError) as caught:
        relay.ask(make_prompt(20, 301))
    assert caught.value.status_code == 503


@pytest.mark.parametrize(("num_steps", "num_pushes"), [(6, 1000), (1000, 4)], ids=["computing", "pushing"])
def test_a_prefill_node_killed_at_work_costs_no_request(
    relay: Relay, references: References, num_steps: int, num_pushes: int
) -> None:
    ensure(relay, prefill=0, decode=1)
    flags = ("--max-num-batched-tokens", "16", *NODE_FLAGS)
    slow = relay.add("prefill", *flags, script=(SLOW_PREFILL, str(num_steps), str(num_pushes), "0"))
    prompt = make_prompt(320, num_pushes)
    expected = references("llama").greedy(prompt)
    before = delivered(relay)
    with relay.open_soon(prompt) as opened:
        wait_until(lambda: "there will be no more" in slow.err, "it is in the middle of it", 30.0)
        relay.nodes.remove(slow)
        slow.kill()
        assert opened.result().token_ids == expected.token_ids
    assert delivered(relay) == before
    relay.settle(timeout_s=8.0)


def test_nodes_come_back_to_a_restarted_router(relay: Relay, references: References) -> None:
    ensure(relay, prefill=1, decode=1)
    nodes = list(relay.nodes)
    generated = relay.decodes[0].metrics().value("generation_tokens_total")
    slow = {"temperature": 1.0, "logprobs": 5, "presence_penalty": 0.5}
    with contextlib.ExitStack() as opened:
        streams = [
            opened.enter_context(relay.open(make_prompt(70, 500 + number), VERY_LONG, **slow))
            for number in range(NUM_SLOW)
        ]
        for stream in streams:
            stream.read(5)
        relay.router.kill()
        for stream in streams:
            with pytest.raises(openai.APIError):
                stream.read_all()
    relay.restart_router()
    wait_until(lambda: relay.router.metrics().value("nodes") == len(nodes), "all nodes are back", 10.0)
    relay.settle()
    generated = relay.decodes[0].metrics().value("generation_tokens_total") - generated
    assert generated < NUM_SLOW * VERY_LONG * 3 // 4, "the requests of the dead router were dropped"
    prompt = make_prompt(71, 501)
    before = delivered(relay)
    assert relay.ask(prompt).token_ids == references("llama").greedy(prompt).token_ids
    assert delivered(relay) == before + 1
    assert [node.is_running for node in nodes] == [True, True]


def test_streams_go_on_exactly_when_the_router_was_paused(relay: Relay, references: References) -> None:
    ensure(relay, prefill=1, decode=1)
    prompts = [make_prompt(50 + index, 700 + index) for index in range(4)]
    num_retries = relay.router.metrics().value("relay_retries_total")
    with ThreadPoolExecutor(1) as aside, relay.open(prompts[0], MOVED) as stream:
        others = aside.submit(relay.ask_all, prompts[1:], 3, MOVED)
        stream.read(5)
        # a handoff that has only half begun outlives its leases, and is tried again
        wait_until(lambda: relay.decodes[0].metrics().value("num_requests_running") == 4, "all are generated")
        relay.router.signal(signal.SIGSTOP)
        time.sleep(3.5)  # longer than a node may be silent
        relay.router.signal(signal.SIGCONT)
        stream.read_all()
        answers = [stream.answer(), *others.result()]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == references("llama").greedy(prompt, MOVED, answer.token_ids).token_ids
    assert relay.router.metrics().value("relay_retries_total") == num_retries


@pytest.mark.parametrize("role", ["prefill", "decode", "router"])
def test_a_program_told_to_stop_finishes_its_streams(relay: Relay, references: References, role: str) -> None:
    ensure(relay, prefill=1, decode=1)
    prompt = make_prompt(64, 600 + len(role))
    leaving: Program = relay.router if role == "router" else next(node for node in relay.nodes if node.role == role)
    with relay.open(prompt, LONG) as stream:
        stream.read(5)
        leaving.signal(signal.SIGTERM)
        stream.read_all()
    token_ids = stream.answer().token_ids
    assert token_ids == references("llama").greedy(prompt, LONG, token_ids).token_ids
    assert leaving.wait_exit(10) == 0
    leaving.require_nothing_left()
    if isinstance(leaving, Node):
        relay.nodes.remove(leaving)
        relay.wait_for_members()
    else:
        relay.restart_router()
        relay.wait_for_members()
