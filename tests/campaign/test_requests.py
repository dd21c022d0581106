"""What clients of a campaign ask: everything the campaign promises to ask, the same for the same seed."""

from __future__ import annotations

import random

import pytest

from tests.campaign.answers import Call, Choice
from tests.campaign.requests import CALLS, CHAT, COMPLETIONS, IMAGE, RESPONSES, SCHEMA, TEXT, Body, make_request

KINDS = {(CHAT, kind) for kind in (TEXT, SCHEMA, CALLS)} | {(RESPONSES, kind) for kind in (TEXT, SCHEMA, CALLS)}
SCHEMAS: dict[str, Body] = {"": {"type": "object", "required": ["a"]}, "go": {"enum": [7]}}


@pytest.mark.parametrize("sees", [False, True])
def test_every_interface_is_asked_for_everything_and_for_images_where_the_model_sees(*, sees: bool) -> None:
    requests = [make_request(random.Random(seed), 100, 0.1, sees=sees) for seed in range(300)]
    assert requests == [make_request(random.Random(seed), 100, 0.1, sees=sees) for seed in range(300)]
    images = {(CHAT, IMAGE), (RESPONSES, IMAGE)} if sees else set()
    assert {(each.api, each.kind) for each in requests} == KINDS | images | {(COMPLETIONS, TEXT)}
    chosen = [each.body["tool_choice"] for each in requests if each.kind == CALLS]
    assert {"required", "function"} == {choice if isinstance(choice, str) else choice["type"] for choice in chosen}
    assert {each.num_choices for each in requests if each.api == CHAT} == {1, 2, 3}


@pytest.mark.parametrize(
    ("choice", "is_valid"),
    [
        (Choice(text='{"a": 1}', finish_reason="stop"), True),
        (Choice(text='{"a"', finish_reason="length"), True),
        (Choice(text='{"a"', finish_reason="stop"), False),
        (Choice(text='{"b": 1}', finish_reason="completed"), False),
    ],
)
def test_an_answer_that_was_not_cut_is_valid_by_its_schema(choice: Choice, *, is_valid: bool) -> None:
    assert (choice.invalid({"": SCHEMAS[""]}) == "") == is_valid


@pytest.mark.parametrize(
    ("arguments", "reason", "is_valid"),
    [("7", "tool_calls", True), ("8", "tool_calls", False), ("", "completed", False), ("", "length", True)],
)
def test_a_call_that_was_not_cut_has_valid_arguments(arguments: str, reason: str, *, is_valid: bool) -> None:
    choice = Choice(finish_reason=reason, calls=[Call("a", "go", arguments)])
    assert (choice.invalid({"go": SCHEMAS["go"]}) == "") == is_valid
    assert Choice(finish_reason="tool_calls").invalid({"go": SCHEMAS["go"]})
