"""`baton serve` as a user meets it: one command, one curl, one Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.system.harness import BLOCK_SIZE, ROOT, START_TIMEOUT_S, wait_until
from tests.system.serve import Serve, serving

MAX_LOCAL_TOKENS = 64
"""A turn that lacks no more stays at the decode node, whatever computing is said to take on a busy machine."""
LONG_QUESTION = f"Tell me a story about a river{', and a boat' * MAX_LOCAL_TOKENS}"
"""Is handed over."""
AGENT_PAGE = ROOT / "docs" / "guides" / "tools_and_schemas.md"


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """A running `baton serve --prefill 1` on the demo model, with its KV in shared memory."""
    flags = ("--prefill", "1", "--device", "cpu", "--resumable-streams-s", "60")
    with serving(tmp_path, *flags, "--local-prefill-tokens", str(MAX_LOCAL_TOKENS)) as program:
        yield program


def chat(serve: Serve, content: str) -> str:
    """One chat request with curl, as the announcement suggests it; the text of the answer."""
    curl = next(line for line in serve.out.splitlines() if line.startswith("curl ")).replace("Hello!", content)
    answer = subprocess.run(["bash", "-c", curl + " -sS --max-time 30"], capture_output=True, check=True, cwd=ROOT)
    sent = answer.stdout.decode().splitlines()
    lines = [line.removeprefix("data: ") for line in sent if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", answer.stdout.decode()
    deltas = [choice["delta"] for line in lines[:-1] for choice in json.loads(line)["choices"]]
    return "".join(delta.get("content", "") for delta in deltas)


def stream(serve: Serve, num_events: int | None = None, last_event_id: str = "") -> list[tuple[str, str]]:
    """Ids and data of the first events of a completion that was asked for, of all without `num_events`."""
    body = {"model": "baton-demo", "prompt": "Once upon a time", "max_tokens": 200, "seed": 7, "ignore_eos": True}
    request = urllib.request.Request(
        f"{serve.endpoint}/v1/completions",
        json.dumps(body | {"stream": True}).encode(),
        {"Content-Type": "application/json", **({"Last-Event-ID": last_event_id} if last_event_id else {})},
    )
    events: list[tuple[str, str]] = []
    with urllib.request.urlopen(request, timeout=60) as answer:
        while len(events) != num_events and (line := answer.readline()):
            data, _ = answer.readline(), answer.readline()
            events.append((line.decode().removeprefix("id: ").strip(), data.decode().removeprefix("data: ").strip()))
    return events


def text(events: list[tuple[str, str]]) -> str:
    """What the events say."""
    return "".join(data if data == "[DONE]" else json.loads(data)["choices"][0]["text"] for _, data in events)


def agent_of_the_guide(serve: Serve) -> str:
    """What the agent of the guide to tools prints, talking to this server."""
    example = AGENT_PAGE.read_text().partition("An agent is a loop")[2].partition("```python\n")[2]
    code = example.partition("```")[0].replace("http://127.0.0.1:8000", serve.endpoint)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=START_TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def require_turns_that_build_on_each_other(client: openai.OpenAI) -> None:
    """Each turn has only its own input, and of all before it, answers included, finds every full block."""
    chat = client.conversations.create()
    turn: openai.types.responses.Response | None
    for is_named in (False, True):
        turn, num_tokens = None, 0
        for asked in (f"{LONG_QUESTION} {is_named}", "And then?", "Who was there?"):
            follows: Any = {"conversation": chat.id} if is_named else {"previous_response_id": turn and turn.id}
            turn = client.responses.create(
                model="baton-demo", input=asked, temperature=0, max_output_tokens=40, **follows
            )
            assert turn.usage is not None
            if num_tokens:  # the first one may share a prefix with anything
                found: Any = turn.usage.input_tokens_details.to_dict()
                assert found["cached_tokens"] == found["cached_tokens_by_node"]["decode"]
                assert found["cached_tokens"] >= (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
            assert turn.usage.input_tokens > num_tokens
            num_tokens = turn.usage.total_tokens
        assert turn is not None
        assert num_tokens > 4 * BLOCK_SIZE
        assert len([*client.responses.input_items.list(turn.id)]) == 5
        client.responses.delete(turn.id)
    client.conversations.delete(chat.id)


def test_serve_answers_restarts_a_killed_node_and_leaves_nothing(serve: Serve) -> None:
    assert chat(serve, "Hello!").strip()
    with openai.OpenAI(base_url=f"{serve.endpoint}/v1", api_key="none", max_retries=0) as client:
        require_turns_that_build_on_each_other(client)
    assert re.fullmatch(r"It is \d\d:\d\d\.\n", agent_of_the_guide(serve))
    victim = serve.child("baton.decode_node")
    os.kill(victim.pid, signal.SIGKILL)
    wait_until(lambda: "is ready again" in serve.err, "the decode node is ready again", START_TIMEOUT_S)
    assert serve.child("baton.decode_node").pid != victim.pid
    assert chat(serve, "What is the capital of France?").strip()
    before = stream(serve, 20)
    serve.life_of_router().kill()
    after = stream(serve, last_event_id=before[-1][0])
    assert text(before + after) == text(stream(serve))
    assert len({name for name, _ in before + after}) == len(before + after)
    children = serve.note_footprint()
    assert len(children) >= 3
    assert serve.ports
    assert serve.segments
    shown_before = serve.err
    serve.signal(signal.SIGINT)
    assert serve.wait_exit() == 0
    assert [line for line in serve.err[len(shown_before) :].splitlines() if "[baton] stopping" not in line] == []
    serve.require_nothing_left(children)
