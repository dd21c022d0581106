"""Agents of client libraries on the demo model: one loop of several steps each.

The model calls functions, the library calls them and sends what they return, and the model answers. Where the library
has it, an answer in the shape of a class too. Checks what the functions got and what the answer says, so the server has
to serve the demo model. A library that cannot be imported raises `ImportError`.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from functools import reduce
from operator import add
from typing import Any

from pydantic import BaseModel

KEY = "none"
QUESTION = "First add 17 and 25, then multiply by 2."
CALLS = [("add", 17, 25), ("multiply", 42, 2)]
ANSWER = "84"
CAPITAL_QUESTION = "What is the capital of France?"
MAX_STEPS = 5


class Capital(BaseModel):
    """A country and its capital."""

    country: str
    capital: str


class Tools:
    """The functions that are offered, which note how they are called."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []

    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        self.calls.append(("add", a, b))
        return a + b

    def multiply(self, a: int, b: int) -> int:
        """Multiply two numbers."""
        self.calls.append(("multiply", a, b))
        return a * b

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """What the function `name` returns, as text."""
        found = {"add": self.add, "multiply": self.multiply}[name](**arguments)
        return str(found)

    def require(self, answer: object) -> None:
        """Raise unless both were called as the question needs it and the answer has the result."""
        _require(self.calls == CALLS, f"calls: {self.calls}")
        _require(ANSWER in str(answer), f"answer: {answer}")


def _require(condition: object, what: str) -> None:
    if not condition:
        raise ValueError(what)


def _require_capital(found: object) -> None:
    _require(found == Capital(country="France", capital="Paris"), f"in the shape of a class: {found!r}")


def _loop(step: Callable[[Tools], object]) -> None:
    """Take steps until one gives an answer, and check it. A step that calls functions gives None."""
    tools = Tools()
    for _ in range(MAX_STEPS):
        answer = step(tools)
        if answer is not None:
            tools.require(answer)
            return
    raise ValueError(f"no answer after {tools.calls}")


_NUMBER = {"type": "integer"}
_NUMBERS = {"type": "object", "properties": {"a": _NUMBER, "b": _NUMBER}, "required": ["a", "b"]}
_FUNCTIONS: Any = [
    {"type": "function", "function": {"name": name, "description": text, "parameters": _NUMBERS}}
    for name, text in (("add", "Add two numbers."), ("multiply", "Multiply two numbers."))
]


def _called(tools: Tools, function: Any) -> str:
    """What a function of a call, with its name and its arguments as text, returns."""
    return tools.call(function.name, json.loads(function.arguments))


def openai_chat(url: str, model: str) -> None:
    """The official client: create, the stream helper, and parse with a class."""
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    settings: Any = {"model": model, "tools": _FUNCTIONS, "temperature": 0}

    def run(streams: bool) -> None:
        messages: list[Any] = [{"role": "user", "content": QUESTION}]

        def step(tools: Tools) -> str | None:
            if streams:
                with client.chat.completions.stream(messages=messages, **settings) as stream:
                    message: Any = stream.get_final_completion().choices[0].message
            else:
                message = client.chat.completions.create(messages=messages, **settings).choices[0].message
            messages.append(message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}))
            messages.extend(
                {"role": "tool", "tool_call_id": call.id, "content": _called(tools, call.function)}
                for call in message.tool_calls or ()
            )
            return None if message.tool_calls else str(message.content)

        _loop(step)

    run(streams=False)
    run(streams=True)
    _openai_strict(client, model)
    asked: Any = [{"role": "user", "content": CAPITAL_QUESTION}]
    parsed = client.chat.completions.parse(model=model, messages=asked, response_format=Capital, temperature=0)
    _require_capital(parsed.choices[0].message.parsed)
    with client.chat.completions.stream(model=model, messages=asked, response_format=Capital, temperature=0) as stream:
        _require_capital(stream.get_final_completion().choices[0].message.parsed)


class Addition(BaseModel):
    """Add two numbers."""

    a: int
    b: int


def _openai_strict(client: Any, model: str) -> None:
    """A strict function made of a class, parsed into it, whole and streamed."""
    import openai

    settings: Any = {
        "model": model,
        "messages": [{"role": "user", "content": "What is 17 + 25?"}],
        "tools": [openai.pydantic_function_tool(Addition, name="add")],
        "temperature": 0,
    }
    whole = client.chat.completions.parse(**settings).choices[0].message
    with client.chat.completions.stream(**settings) as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_completion().choices[0].message
    _require("tool_calls.function.arguments.done" in kinds, f"events: {kinds}")
    for message in (whole, streamed):
        found = message.tool_calls[0].function.parsed_arguments
        _require(found == Addition(a=17, b=25), f"arguments: {found!r}")


def openai_thinking(url: str, model: str) -> None:
    """The official client with thinking switched on: reasoning comes apart from the answer."""
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is 123 + 489?"}],
        temperature=0,
        extra_body={"chat_template_kwargs": {"enable_thinking": True}},
    ).choices[0]
    reasoning = getattr(answer.message, "reasoning_content", "")
    _require(reasoning and "<" not in reasoning, f"reasoning: {reasoning!r}")
    _require(answer.message.content == "123 + 489 = 612.", f"answer: {answer.message.content}")


def _require_events(kinds: list[str]) -> None:
    """An answer of one item: it begins, grows and ends as the client expects it."""
    is_call = "response.function_call_arguments.done" in kinds
    delta = "response.function_call_arguments.delta" if is_call else "response.output_text.delta"
    _require(kinds[0] == "response.created" and kinds[-1] == "response.completed", f"events: {kinds}")
    _require(kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 1, "one item")
    _require(delta in kinds, f"events: {kinds}")


def openai_responses(url: str, model: str) -> None:
    """The official client over responses: create, the stream helper with its events, and parse with a class."""
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    offered: Any = [{"type": "function", **tool["function"], "strict": False} for tool in _FUNCTIONS]
    settings: Any = {"model": model, "tools": offered, "temperature": 0, "store": False}

    def run(streams: bool) -> None:
        items: list[Any] = [{"role": "user", "content": QUESTION}]

        def step(tools: Tools) -> str | None:
            if streams:
                with client.responses.stream(input=items, **settings) as stream:
                    _require_events([event.type for event in stream])
                    answer: Any = stream.get_final_response()
            else:
                answer = client.responses.create(input=items, **settings)
            items.extend(item.model_dump(exclude_none=True) for item in answer.output)
            calls = [item for item in answer.output if item.type == "function_call"]
            items.extend(
                {"type": "function_call_output", "call_id": call.call_id, "output": _called(tools, call)}
                for call in calls
            )
            return None if calls else answer.output_text

        _loop(step)

    run(streams=False)
    run(streams=True)
    parsed = client.responses.parse(model=model, input=CAPITAL_QUESTION, text_format=Capital, temperature=0)
    _require_capital(parsed.output_parsed)


def langchain(url: str, model: str) -> None:
    """langchain-openai: bind_tools, streamed and not, and with_structured_output by each of its methods."""
    from langchain_core.messages import HumanMessage, ToolMessage  # type: ignore[import-not-found]
    from langchain_openai import ChatOpenAI  # type: ignore[import-not-found]

    chat = ChatOpenAI(base_url=f"{url}/v1", api_key=KEY, model=model, temperature=0, max_retries=0)

    def run(streams: bool) -> None:
        messages: list[Any] = [HumanMessage(QUESTION)]

        def step(tools: Tools) -> str | None:
            bound = chat.bind_tools([tools.add, tools.multiply])
            message = reduce(add, bound.stream(messages)) if streams else bound.invoke(messages)
            messages.append(message)
            for call in message.tool_calls:
                messages.append(ToolMessage(tools.call(call["name"], call["args"]), tool_call_id=call["id"]))
            return None if message.tool_calls else message.content

        _loop(step)

    run(streams=False)
    run(streams=True)
    for method in ("json_schema", "function_calling"):
        _require_capital(chat.with_structured_output(Capital, method=method).invoke(CAPITAL_QUESTION))
    asked = f"{CAPITAL_QUESTION} Answer in JSON with country and capital."
    _require_capital(chat.with_structured_output(Capital, method="json_mode").invoke(asked))


def litellm(url: str, model: str) -> None:
    """litellm: completion with tools, whole and streamed, and a class as response_format."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm as library  # type: ignore[import-not-found]

    settings = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": KEY, "temperature": 0}

    def run(streams: bool) -> None:
        messages: list[Any] = [{"role": "user", "content": QUESTION}]

        def step(tools: Tools) -> str | None:
            answer = library.completion(messages=messages, tools=_FUNCTIONS, stream=streams, **settings)
            if streams:
                answer = library.stream_chunk_builder(list(answer), messages=messages)
            message = answer.choices[0].message
            messages.append(message)
            for call in message.tool_calls or ():
                messages.append({"role": "tool", "tool_call_id": call.id, "content": _called(tools, call.function)})
            return None if message.tool_calls else message.content

        _loop(step)

    run(streams=False)
    run(streams=True)
    asked = [{"role": "user", "content": CAPITAL_QUESTION}]
    found = library.completion(messages=asked, response_format=Capital, **settings).choices[0].message.content
    _require_capital(Capital.model_validate_json(found))


def pydantic_ai(url: str, model: str) -> None:
    """pydantic-ai over chat, responses and messages: agents with tools, and agents with an output class."""
    import anthropic as anthropic_client  # type: ignore[import-not-found]
    from pydantic_ai import Agent, NativeOutput  # type: ignore[import-not-found]
    from pydantic_ai.models.anthropic import AnthropicModel  # type: ignore[import-not-found]
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel  # type: ignore[import-not-found]
    from pydantic_ai.providers.anthropic import AnthropicProvider  # type: ignore[import-not-found]
    from pydantic_ai.providers.openai import OpenAIProvider  # type: ignore[import-not-found]

    provider = OpenAIProvider(base_url=f"{url}/v1", api_key=KEY)
    client = anthropic_client.AsyncAnthropic(base_url=url, api_key=KEY, max_retries=0)
    chat, responses = OpenAIChatModel(model, provider=provider), OpenAIResponsesModel(model, provider=provider)
    messages = AnthropicModel(model, provider=AnthropicProvider(anthropic_client=client))
    settings: Any = {"temperature": 0, "max_tokens": 200}
    for way in (chat, responses, messages):
        tools = Tools()
        agent = Agent(way, tools=[tools.add, tools.multiply], model_settings=settings)
        tools.require(agent.run_sync(QUESTION).output)
    tools = Tools()
    agent = Agent(chat, tools=[tools.add, tools.multiply], model_settings=settings)
    tools.require(agent.run_stream_sync(QUESTION).get_output())
    for way, shape in ((chat, Capital), (chat, NativeOutput(Capital)), (responses, Capital), (messages, Capital)):
        _require_capital(Agent(way, output_type=shape, model_settings=settings).run_sync(CAPITAL_QUESTION).output)


def openai_agents(url: str, model: str) -> None:
    """The OpenAI Agents SDK over chat completions and over responses: tools, an output class, and a conversation."""
    import agents  # type: ignore[import-not-found]
    import openai

    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    settings = agents.ModelSettings(temperature=0)
    for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
        common = {"model": kind(model=model, openai_client=client), "model_settings": settings}
        tools = Tools()
        offered = [agents.function_tool(tools.add), agents.function_tool(tools.multiply)]
        agent = agents.Agent(name="Agent", instructions="Use the tools.", tools=offered, **common)
        tools.require(agents.Runner.run_sync(agent, QUESTION).final_output)
        agent = agents.Agent(name="Capitals", output_type=Capital, **common)
        _require_capital(agents.Runner.run_sync(agent, CAPITAL_QUESTION).final_output)
    asyncio.run(_run_session(url, model))


async def _run_session(url: str, model: str) -> None:
    """Turns whose history is a conversation: written by the library, then continued by the server itself."""
    import agents
    import openai

    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    agent = agents.Agent(name="Capitals", model=agents.OpenAIResponsesModel(model=model, openai_client=client))
    session = agents.OpenAIConversationsSession(openai_client=client)
    await agents.Runner.run(agent, CAPITAL_QUESTION, session=session)
    _require([item["role"] for item in await session.get_items()] == ["user", "assistant"], "the first turn")
    await agents.Runner.run(agent, CAPITAL_QUESTION, conversation_id=session.session_id)
    _require(len(await session.get_items()) == 4, "both turns")
    await session.pop_item()
    _require(len(await session.get_items()) == 3, "one item less")
    await session.clear_session()


def anthropic(url: str, model: str) -> None:
    """Anthropic's client: messages with tools, whole and streamed, its tool runner, and parse with a class."""
    import anthropic as library

    client = library.Anthropic(base_url=url, api_key=KEY, max_retries=0)
    offered = [
        {"name": tool["function"]["name"], "description": tool["function"]["description"], "input_schema": _NUMBERS}
        for tool in _FUNCTIONS
    ]
    settings: Any = {"model": model, "tools": offered, "max_tokens": 200, "extra_body": {"temperature": 0}}

    def run(streams: bool) -> None:
        messages: list[Any] = [{"role": "user", "content": QUESTION}]

        def step(tools: Tools) -> str | None:
            if streams:
                with client.messages.stream(messages=messages, **settings) as stream:
                    message = stream.get_final_message()
            else:
                message = client.messages.create(messages=messages, **settings)
            messages.append({"role": "assistant", "content": message.content})
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": tools.call(block.name, block.input)}
                for block in message.content
                if block.type == "tool_use"
            ]
            messages.append({"role": "user", "content": results})
            return None if results else "".join(block.text for block in message.content if block.type == "text")

        _loop(step)

    run(streams=False)
    run(streams=True)
    tools = Tools()
    functions = [library.beta_tool(_as_text(function)) for function in (tools.add, tools.multiply)]
    asked: Any = {"messages": [{"role": "user", "content": QUESTION}]}
    runner = client.beta.messages.tool_runner(**{**settings, **asked, "tools": functions})
    tools.require(list(runner)[-1].content[-1].text)
    asked = {"messages": [{"role": "user", "content": CAPITAL_QUESTION}], "output_format": Capital}
    del settings["tools"]
    _require_capital(client.messages.parse(**settings, **asked).parsed_output)


def _as_text(function: Callable[[int, int], int]) -> Callable[[int, int], str]:
    """The function as Anthropic's runner wants it: what it returns is text."""

    def called(a: int, b: int) -> str:
        return str(function(a, b))

    called.__name__, called.__doc__ = function.__name__, function.__doc__
    return called


AGENTS: dict[str, Callable[[str, str], None]] = {
    "agent: openai: chat": openai_chat,
    "agent: openai: thinking": openai_thinking,
    "agent: openai: responses": openai_responses,
    "agent: langchain-openai": langchain,
    "agent: litellm": litellm,
    "agent: pydantic-ai": pydantic_ai,
    "agent: openai-agents": openai_agents,
    "agent: anthropic": anthropic,
}
