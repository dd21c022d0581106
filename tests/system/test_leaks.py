"""Requests that end early give everything back. The check itself runs after every test of this folder."""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from tests.system.harness import MODEL_NAME, Relay
from tests.system.reference import Reference, make_prompt

NUM_DISCONNECTS = 50
MAX_PATIENCE_S = 0.25


def hang_up(relay: Relay, number: int) -> bool:
    """Send a request and close the connection a random moment later. Whether anything had come by then."""
    source = random.Random(number)
    prompt = make_prompt(source.randrange(20, 250), 40_000 + number)
    payload = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 250, "stream": True, "ignore_eos": True}
    body = json.dumps(payload)
    url = urlsplit(relay.router.address)
    with socket.create_connection((url.hostname or "", url.port or 0), timeout=10) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        time.sleep(source.uniform(0, MAX_PATIENCE_S))
        connection.setblocking(False)
        try:
            return bool(connection.recv(1))
        except BlockingIOError:
            return False


def test_clients_that_hang_up_leave_nothing(llama_relay: Relay, references: Callable[[str], Reference]) -> None:
    before = llama_relay.router.metrics().value("relay_cancelled_total")
    with ThreadPoolExecutor(6) as threads:
        had_begun = list(threads.map(lambda number: hang_up(llama_relay, number), range(NUM_DISCONNECTS)))
    assert 0 < sum(had_begun) < NUM_DISCONNECTS, "some hung up before the first token, some after"
    llama_relay.settle()
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
    reply = llama_relay.client.completions.create(
        model=MODEL_NAME,
        prompt=list(prompt),
        n=3,
        max_tokens=24,
        temperature=0.0,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    expected = list(references("llama").greedy(prompt).token_ids)
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert [(choice.model_extra or {})["token_ids"] for choice in reply.choices] == [expected] * 3
