"""Client libraries, each used as its users do. A library that cannot be imported raises `ImportError`.

Every function takes the address with `/v1` and the model's name, and raises when an answer is not what it should be.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import openai

KEY = "none"
QUESTION = "What is the capital of France?"


def _require(condition: object, what: str) -> None:
    if not condition:
        raise ValueError(what)


def openai_chat(base: str, model: str) -> None:
    """Chat, whole and streamed, with everything that changes the answer's shape."""
    import openai

    client = openai.OpenAI(base_url=base, api_key=KEY, max_retries=0)
    messages: Any = [{"role": "user", "content": QUESTION}]
    answer = client.chat.completions.create(
        model=model, messages=messages, n=2, logprobs=True, top_logprobs=3, max_tokens=8
    )
    _require(len(answer.choices) == 2, "two choices")
    _require(answer.choices[0].logprobs is not None, "log probabilities")
    stream = client.chat.completions.create(
        model=model, messages=messages, stream=True, stream_options={"include_usage": True}, max_completion_tokens=16
    )
    _require(list(stream)[-1].usage, "usage at the end of a stream")
    with client.chat.completions.stream(model=model, messages=messages, max_tokens=16) as helper:
        _require(len(list(helper)) > 1, "events of the helper")


def openai_prediction(base: str, model: str) -> None:
    """A chat whose answer was guessed right: it is the same, and its usage says what became of the guess."""
    import openai

    client = openai.OpenAI(base_url=base, api_key=KEY, max_retries=0)
    asked: Any = {"model": model, "messages": [{"role": "user", "content": QUESTION}], "seed": 5, "max_tokens": 32}
    text = client.chat.completions.create(**asked).choices[0].message.content or ""
    answer = client.chat.completions.create(**asked, prediction={"type": "content", "content": text})
    _require(answer.choices[0].message.content == text, "the same answer")
    details = answer.usage and answer.usage.completion_tokens_details
    _require(details is not None and details.accepted_prediction_tokens is not None, "accepted tokens")


def openai_completions(base: str, model: str) -> None:
    """Completions of texts and of token ids."""
    import openai

    client = openai.OpenAI(base_url=base, api_key=KEY, max_retries=0)
    _require(len(client.completions.create(model=model, prompt=["One", "Two"], max_tokens=4).choices) == 2, "choices")
    _require(client.completions.create(model=model, prompt=[60, 61], logprobs=2, max_tokens=4).choices, "choices")
    _require(list(client.completions.create(model=model, prompt="One", stream=True)), "chunks")


def openai_responses(base: str, model: str) -> None:
    """Responses, whole, streamed, and with the stream helper."""
    import openai

    client = openai.OpenAI(base_url=base, api_key=KEY, max_retries=0)
    answer = client.responses.create(model=model, input=QUESTION, instructions="Be brief.", max_output_tokens=16)
    _require(answer.usage is not None and answer.usage.output_tokens, "usage")
    events = list(client.responses.create(model=model, input=QUESTION, stream=True, max_output_tokens=16))
    _require(events[-1].type in ("response.completed", "response.incomplete"), "an end")
    with client.responses.stream(model=model, input=QUESTION, max_output_tokens=16) as stream:
        _require(len(list(stream)) > 4, "events")


def openai_stored_responses(base: str, model: str) -> None:
    """A conversation of which each turn sends only what is new: whole and streamed, read again, listed and deleted."""
    import openai

    client = openai.OpenAI(base_url=base, api_key=KEY, max_retries=0)
    settings: Any = {"model": model, "max_output_tokens": 16, "store": True}
    first = client.responses.create(input=QUESTION, instructions="Be brief.", **settings)
    with client.responses.stream(input="And of Spain?", previous_response_id=first.id, **settings) as stream:
        second = stream.get_final_response()
    _require(second.previous_response_id == first.id, "the response that it follows")
    _require(client.responses.retrieve(second.id).output_text == second.output_text, "the same text, read again")
    items = [*client.responses.input_items.list(second.id, order="asc", limit=1)]
    _require([item.type for item in items] == ["message"] * 3, "question, answer and question")
    client.responses.delete(first.id)
    for ask in (
        lambda: client.responses.retrieve(first.id),
        lambda: client.responses.create(input="And?", previous_response_id=second.id, **settings),
    ):
        try:
            ask()
        except (openai.NotFoundError, openai.BadRequestError):
            continue
        raise ValueError("a response that was deleted is found")


def openai_conversations(base: str, model: str) -> None:
    """A conversation with an id of its own: continued whole and streamed, listed in pages, changed and deleted."""
    import openai

    client = openai.OpenAI(base_url=base, api_key=KEY, max_retries=0)
    settings: Any = {"model": model, "max_output_tokens": 16}
    made = client.conversations.create(
        metadata={"topic": "capitals"}, items=[{"role": "system", "content": "Be brief."}]
    )
    first = client.responses.create(input=QUESTION, conversation=made.id, **settings)
    with client.responses.stream(input="And of Spain?", conversation={"id": made.id}, **settings) as stream:
        second = stream.get_final_response()
    _require(second.conversation is not None and second.conversation.id == made.id, "the conversation of a response")
    items = [*client.conversations.items.list(made.id, order="asc", limit=2)]
    _require([item.type for item in items] == ["message"] * 5, "what began it, and two questions with their answers")
    client.conversations.items.create(made.id, items=[{"role": "user", "content": "Thanks."}])
    _require(client.conversations.update(made.id, metadata={}).metadata == {}, "other metadata")
    client.conversations.delete(made.id)
    for ask in (
        lambda: client.conversations.retrieve(made.id),
        lambda: client.responses.create(input="And?", conversation=made.id, **settings),
        lambda: client.responses.retrieve(first.id),
    ):
        try:
            ask()
        except openai.NotFoundError:
            continue
        raise ValueError("a conversation that was deleted is found")


def openai_tools(base: str, model: str) -> None:
    """An agent's loop with two tools."""
    import openai

    with openai.OpenAI(base_url=base, api_key=KEY, max_retries=0) as client:
        tool_loop(client, model)


def tool_loop(client: openai.OpenAI, model: str) -> None:
    """Two tools are called once each, whole and streamed, and what they give goes back; then text is wanted."""
    digit = {"type": "integer", "minimum": 0, "maximum": 9}
    add = {"type": "object", "properties": {"a": digit, "b": digit}, "required": ["a", "b"]}
    tools: Any = [
        {"type": "function", "function": {"name": "add", "parameters": {**add, "additionalProperties": False}}},
        {"type": "function", "function": {"name": "now", "description": "The time of day"}},
    ]
    messages: Any = [{"role": "user", "content": "2 + 3?"}]
    settings: Any = {"model": model, "tools": tools, "parallel_tool_calls": False, "max_tokens": 150, "seed": 5}
    choices: Any = ["required", {"type": "function", "function": {"name": "add"}}]
    for choice in choices:
        answer = client.chat.completions.create(messages=messages, tool_choice=choice, **settings)
        with client.chat.completions.stream(messages=messages, tool_choice=choice, **settings) as stream:
            streamed = stream.get_final_completion().choices[0]
        _require(answer.choices[0].finish_reason == streamed.finish_reason == "tool_calls", "calls")
        message = answer.choices[0].message
        (call,), (same,) = message.tool_calls or [], streamed.message.tool_calls or []
        _require(call.function.name == same.function.name, "the same function, streamed")
        _require(call.function.arguments == same.function.arguments, "the same arguments, streamed")
        arguments = json.loads(call.function.arguments)
        _require(arguments.keys() == ({"a", "b"} if call.function.name == "add" else set()), "valid arguments")
        messages.append(message)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(sum(arguments.values()))})
    last = client.chat.completions.create(model=model, messages=messages, tools=tools, tool_choice="none", max_tokens=8)
    _require(last.choices[0].message.content is not None and not last.choices[0].message.tool_calls, "text at the end")


def openai_models_and_errors(base: str, model: str) -> None:
    """Models, and errors of the client's own tree."""
    import openai

    client = openai.OpenAI(base_url=base, api_key=KEY, max_retries=0)
    _require([each.id for each in client.models.list()] == [model], "the model in the list")
    _require(client.models.retrieve(model).id == model, "the model by its name")
    try:
        client.completions.create(model="other", prompt="x")
    except openai.NotFoundError:
        return
    raise ValueError("NotFoundError for another model")


def langchain(base: str, model: str) -> None:
    """langchain-openai: ChatOpenAI over chat and over responses, and OpenAI over completions."""
    from langchain_openai import ChatOpenAI, OpenAI  # type: ignore[import-not-found]

    settings = {"base_url": base, "api_key": KEY, "model": model, "max_retries": 0, "max_tokens": 16}
    _require(ChatOpenAI(**settings).invoke(QUESTION).usage_metadata, "usage")
    _require(list(ChatOpenAI(stream_usage=True, **settings).stream(QUESTION)), "chunks")
    _require(ChatOpenAI(use_responses_api=True, **settings).invoke(QUESTION).usage_metadata, "usage of responses")
    _require(list(ChatOpenAI(use_responses_api=True, **settings).stream(QUESTION)), "events of responses")
    _require(OpenAI(**settings).invoke("One") is not None, "a completion")


def litellm(base: str, model: str) -> None:
    """litellm: chat, completions and responses."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm as library  # type: ignore[import-not-found]

    settings = {"model": f"openai/{model}", "api_base": base, "api_key": KEY}
    messages = [{"role": "user", "content": QUESTION}]
    _require(library.completion(messages=messages, max_tokens=16, **settings).choices, "choices")
    _require(list(library.completion(messages=messages, max_tokens=16, stream=True, **settings)), "chunks")
    text = {**settings, "model": f"text-completion-openai/{model}"}
    _require(library.text_completion(prompt="One", max_tokens=8, **text).choices, "choices of completions")
    _require(library.responses(input=QUESTION, max_output_tokens=16, **settings).output, "output of responses")


def llama_index(base: str, model: str) -> None:
    """LlamaIndex: OpenAILike over chat and over completions."""
    from llama_index.llms.openai_like import OpenAILike  # type: ignore[import-not-found]

    for is_chat in (True, False):
        llm = OpenAILike(model=model, api_base=base, api_key=KEY, is_chat_model=is_chat, max_tokens=16, max_retries=0)
        _require(llm.complete(QUESTION) is not None, "a completion")
        _require(list(llm.stream_complete(QUESTION)), "chunks")


LIBRARIES = {
    "openai: chat": openai_chat,
    "openai: prediction": openai_prediction,
    "openai: completions": openai_completions,
    "openai: responses": openai_responses,
    "openai: stored responses": openai_stored_responses,
    "openai: conversations": openai_conversations,
    "openai: models and errors": openai_models_and_errors,
    "openai: tools": openai_tools,
    "langchain-openai": langchain,
    "litellm": litellm,
    "llama-index": llama_index,
}
