"""Requests that end early give everything back. The check itself runs after every test of this folder."""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from tests.campaign.deployment import Footprint
from tests.system.harness import BLOCK_SIZE, MODEL_NAME, Relay
from tests.system.reference import Reference, make_prompt

NUM_DISCONNECTS = 50
MAX_ROUNDS = 5
MAX_PATIENCE_S = 0.25


def hang_up(relay: Relay, number: int) -> bool:
    """Send a request and close the connection a random moment later, or every other time when the first byte has come.
    Whether anything had come by then."""
    source = random.Random(number)
    prompt = make_prompt(source.randrange(20, 250), 40_000 + number)
    payload = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 250, "stream": True, "ignore_eos": True}
    body = json.dumps(payload)
    url = urlsplit(relay.router.address)
    with socket.create_connection((url.hostname or "", url.port or 0), timeout=60) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        if number % 2:
            return bool(connection.recv(1))
        time.sleep(source.uniform(0, MAX_PATIENCE_S))
        connection.setblocking(False)
        try:
            return bool(connection.recv(1))
        except BlockingIOError:
            return False


def held(relay: Relay) -> dict[str, Footprint]:
    """What every program holds."""
    return {program.name: Footprint.of(program.process.pid) for program in (relay.router, *relay.nodes)}


def grown(before: dict[str, Footprint], now: dict[str, Footprint]) -> list[str]:
    """The programs that hold more than before."""
    pairs = ((name, before[name], footprint) for name, footprint in now.items())
    return [
        f"{name}: {footprint}, before {then}"
        for name, then, footprint in pairs
        if footprint.num_files > then.num_files or footprint.num_threads > then.num_threads
    ]


def test_clients_that_hang_up_leave_nothing(llama_relay: Relay, references: Callable[[str], Reference]) -> None:
    """The first ones make programs open what they open once, such as the connection of two nodes. After some round
    files and threads of all programs are what they were before it; `python -m tests.soak` looks for longer."""
    before = llama_relay.router.metrics().value("relay_cancelled_total")
    had_begun: list[bool] = []
    footprints: list[dict[str, Footprint]] = []
    while len(footprints) < 2 or grown(*footprints[-2:]):
        assert len(footprints) < MAX_ROUNDS, grown(*footprints[-2:])
        numbers = range(len(had_begun), len(had_begun) + NUM_DISCONNECTS // 2)
        with ThreadPoolExecutor(6) as threads:
            had_begun += threads.map(lambda number: hang_up(llama_relay, number), numbers)
        llama_relay.settle()
        footprints.append(held(llama_relay))
    assert 0 < sum(had_begun) < len(had_begun), "some hung up before the first token, some after"
    assert llama_relay.router.metrics().value("relay_cancelled_total") >= before + NUM_DISCONNECTS // 2
    prompt = make_prompt(60, 41_000)
    assert llama_relay.ask(prompt).token_ids == references("llama").greedy(prompt).token_ids


def test_a_stop_string_ends_the_work_on_the_nodes(llama_relay: Relay) -> None:
    def num_generated() -> int:
        llama_relay.settle()
        return sum(node.metrics().value("generation_tokens_total") for node in llama_relay.decodes)

    prompts = [make_prompt(33 + index, 42_000 + index) for index in range(6)]
    texts = [llama_relay.ask(prompt, max_tokens=40).text for prompt in prompts]
    before = num_generated()
    for prompt, text in zip(prompts, texts, strict=True):
        stop = text[12:15]
        answer = llama_relay.ask(prompt, max_tokens=400, stop=[stop])
        assert answer.finish_reason == "stop"
        assert answer.text == text[: text.index(stop)]
    assert num_generated() - before < 400 * len(prompts) // 2


def test_several_choices_of_one_prompt(llama_relay: Relay, references: Callable[[str], Reference]) -> None:
    prompt = make_prompt(70, 43_000)
    answers = choices_of(llama_relay, prompt, num_choices=3, temperature=0.0)
    assert answers == [list(references("llama").greedy(prompt).token_ids)] * 3


def test_choices_of_one_prompt_cost_one_prompt_and_one_handoff(llama_relay: Relay) -> None:
    def counts() -> list[int]:
        llama_relay.settle()
        received = [node.metrics() for node in llama_relay.decodes]
        return [
            sum(node.metrics().value("computed_tokens_total") for node in llama_relay.prefills),
            sum(metrics.value("kv_receive_delivered_total") for metrics in received),
            sum(metrics.value("kv_receive_blocks_total") for metrics in received),
        ]

    prompt = make_prompt(70, 43_001)
    before = counts()
    answers = choices_of(llama_relay, prompt, num_choices=4, seed=5)
    differences = [after - earlier for after, earlier in zip(counts(), before, strict=True)]
    assert differences == [len(prompt), 1, -(-len(prompt) // BLOCK_SIZE)]
    assert len({tuple(token_ids) for token_ids in answers}) > 1
    assert choices_of(llama_relay, prompt, num_choices=4, seed=5) == answers, "other nodes say the same"
    assert choices_of(llama_relay, prompt, num_choices=1, seed=5) == answers[:1]


def choices_of(relay: Relay, prompt: Sequence[int], num_choices: int, **options: Any) -> list[list[int]]:
    """The tokens of all choices; their prompt must be counted once."""
    reply = relay.client.completions.create(
        model=MODEL_NAME,
        prompt=list(prompt),
        n=num_choices,
        max_tokens=24,
        extra_body={"return_token_ids": True, "ignore_eos": True},
        **options,
    )
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(prompt), 24 * num_choices)
    assert [choice.index for choice in reply.choices] == list(range(num_choices))
    return [(choice.model_extra or {})["token_ids"] for choice in reply.choices]
