"""The examples that are one Python file, each run as a user runs it, on real nodes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.models.image_files import as_file, picture
from tests.engine.models.seeing import make_seeing
from tests.examples.conftest import RunExample, opened


def test_a_batch_without_a_server_is_continued_in_order(run_example: RunExample) -> None:
    *continued, answered = run_example("offline_batch.py").splitlines()
    assert [line.split(" ...")[0] for line in continued] == [
        "Once upon a time there was a fox",
        "The capital of France is",
        "17 + 25 =",
        "A spider has",
    ]
    assert "Paris" in continued[1]
    assert answered.startswith("I am the demo model of Baton")


def test_a_chat_is_streamed_and_counted(run_example: RunExample, demo_url: str) -> None:
    text, counted = run_example("openai_client.py", "--url", demo_url).splitlines()
    assert text.strip() == "The capital of France is Paris."
    assert re.fullmatch(r"\[baton-demo: \d+ \+ \d+ tokens\]", counted)


def test_an_agent_calls_its_tool_and_answers_with_what_it_said(run_example: RunExample, demo_url: str) -> None:
    called, answered = run_example("tools_agent.py", "--url", demo_url).splitlines()
    found = re.fullmatch(r"get_time\(\{\}\) -> (\d\d:\d\d)", called)
    assert found is not None
    assert found[1] in answered


def test_facts_come_as_json_of_the_schema(run_example: RunExample, demo_url: str) -> None:
    assert json.loads(run_example("structured_extraction.py", "--url", demo_url)) == {
        "name": "Maria",
        "age": 34,
        "city": "Lisbon",
    }
    # by itself the model says what it has read
    older = run_example("structured_extraction.py", "Maria is 999 years old and lives in Lisbon.", "--url", demo_url)
    assert json.loads(older)["age"] <= 150


@pytest.fixture
def seeing_url(tmp_path: Path) -> Iterator[str]:
    """Where a tiny model with random weights sees."""
    model = make_seeing(tmp_path / "seeing", "qwen3-vl").folder
    for relay in opened(model, tmp_path / "relay", has_prefill=False, name="seeing"):
        yield relay.router.address


def test_a_picture_is_part_of_the_prompt(run_example: RunExample, seeing_url: str, tmp_path: Path) -> None:
    counted = []
    for size in (32, 96):
        path = tmp_path / f"{size}.png"
        path.write_bytes(as_file(picture(size, size)))
        out = run_example("image_question.py", str(path), "--url", seeing_url, "--max-tokens", "4")
        counted.append(int(re.findall(r"\[(\d+) tokens of prompt", out)[0]))
    assert counted[1] > counted[0] > 0
