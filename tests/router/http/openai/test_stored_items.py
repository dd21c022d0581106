"""Items as they are stored: read again they say what they said, and OpenAI's client knows their form."""

from __future__ import annotations

from typing import Any

import pydantic
import pytest
from openai.types.responses import ResponseItem

from baton.router.http.openai.replies import ReplyHead
from baton.router.http.openai.responses_input import read_input
from baton.router.http.openai.schemas import MAX_MESSAGES
from baton.router.http.openai.stored_items import objects_of, response_of, turn_of
from baton.wire.errors import InvalidRequest

HEAD = ReplyHead("resp-1", 0, "m")
ITEM: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseItem)
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,eA==", "detail": "auto"}
CALL = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
REASONING = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
LOGPROBS = [{"token": "Well.", "logprob": -1.0}]
OUTPUT = [{"type": "output_text", "text": "Well.", "annotations": [], "logprobs": LOGPROBS}]
RESPONSE = {
    "id": "resp_1",
    "output": [
        {"id": "rs_1", "status": "completed", **REASONING},
        {"id": "msg_1", "status": "completed", "type": "message", "role": "assistant", "content": OUTPUT},
        {"id": "fc_1", "status": "completed", **CALL},
    ],
}
INPUTS: list[Any] = [
    "Hello",
    [{"role": "user", "content": "Hello"}],
    [{"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "input_text", "text": "brief"}]}],
    [{"role": "user", "content": [{"type": "input_text", "text": "See"}, IMAGE]}],
    [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "And?"}],
    [{"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}],
    [{"role": "assistant", "content": OUTPUT}],
    [REASONING, CALL, {"type": "function_call_output", "call_id": "a", "output": "8"}],
    [{"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "9"}]}],
    [{"type": "reasoning", "encrypted_content": "x"}, {"role": "user", "content": "Hi", "colour": "blue"}],
]


@pytest.mark.parametrize("value", INPUTS)
def test_a_conversation_that_is_continued_is_the_one_that_was_sent(value: Any) -> None:
    turn = turn_of(RESPONSE, read_input(value).items, None, HEAD.id_of)
    sent = [{"role": "user", "content": value}] if isinstance(value, str) else value
    whole = read_input([*sent, *RESPONSE["output"], {"role": "user", "content": "And then?"}])
    assert read_input("And then?").after(objects_of(turn.items)).messages == whole.messages


@pytest.mark.parametrize("value", INPUTS)
def test_items_have_the_form_and_the_ids_by_which_they_are_listed(value: Any) -> None:
    conversation = read_input(value)
    items = objects_of(turn_of(RESPONSE, conversation.items, None, HEAD.id_of).items)
    for item in items:
        ITEM.validate_python(item)
    assert len({item["id"] for item in items}) == len(conversation.items) + len(RESPONSE["output"])


def test_log_probabilities_are_not_stored_and_the_response_keeps_its_own() -> None:
    turn = turn_of(RESPONSE, read_input("Hi").items, None, HEAD.id_of)
    assert response_of(turn)["output"][1]["content"] == [{**OUTPUT[0], "logprobs": []}]
    assert objects_of(turn.items)[2]["content"] == [{**OUTPUT[0], "logprobs": []}]
    assert OUTPUT[0]["logprobs"] is LOGPROBS


def test_both_parts_together_have_the_limits_of_an_input() -> None:
    one = {"role": "user", "content": "x"}
    many = read_input([one] * 48)
    assert len(many.after([one] * (MAX_MESSAGES - 48)).messages) == MAX_MESSAGES
    with pytest.raises(InvalidRequest, match=f"more than {MAX_MESSAGES} items"):
        many.after([one] * (MAX_MESSAGES - 47))
    long = {"role": "user", "content": "x" * 2**19}
    assert read_input([long]).after([long]).messages
    with pytest.raises(InvalidRequest, match="characters"):
        read_input([long, one]).after([long])


def test_an_item_that_cannot_be_read_again_is_the_clients_error() -> None:
    with pytest.raises(InvalidRequest, match="must be a string"):
        read_input("Hi").after([{**CALL, "name": ""}])
