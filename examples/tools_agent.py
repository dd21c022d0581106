"""An agent: the model may call a function, sees what it returned, and goes on until it has an answer.

    baton serve                                          # in another terminal
    python examples/tools_agent.py "What time is it?"

Functions run here, never in the server.
"""

from __future__ import annotations

import argparse
import json
from datetime import datetime
from typing import Any

import openai


def get_time() -> str:
    """The time of day."""
    return f"{datetime.now():%H:%M}"


FUNCTIONS = {"get_time": get_time}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": function.__doc__}}
    for name, function in FUNCTIONS.items()
]
MAX_STEPS = 5  # a model may call for ever; an agent must not


def call(name: str, arguments: str) -> str:
    """What the function says. Names and arguments are made by a model: whatever is wrong with them, it is told."""
    try:
        return FUNCTIONS[name](**json.loads(arguments or "{}"))
    except (KeyError, TypeError, ValueError) as error:
        return f"error: {error!r}"


def run(client: openai.OpenAI, model: str, question: str) -> str:
    """The answer, after as many calls as the model wants."""
    chat: Any = [{"role": "user", "content": question}]
    for _ in range(MAX_STEPS):
        answer = client.chat.completions.create(model=model, messages=chat, tools=TOOLS, temperature=0, max_tokens=200)
        message = answer.choices[0].message
        chat.append(message)
        if not message.tool_calls:
            return (message.content or "").strip()
        for tool_call in message.tool_calls:
            if tool_call.type == "function":
                result = call(tool_call.function.name, tool_call.function.arguments)
                print(f"{tool_call.function.name}({tool_call.function.arguments}) -> {result}")
                chat.append({"role": "tool", "tool_call_id": tool_call.id, "content": result})
    return f"no answer after {MAX_STEPS} steps"


def main() -> None:
    """Ask one question."""
    parser = argparse.ArgumentParser()
    parser.add_argument("question", nargs="?", default="What time is it?")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    arguments = parser.parse_args()
    client = openai.OpenAI(base_url=f"{arguments.url}/v1", api_key="none")
    print(run(client, client.models.list().data[0].id, arguments.question))


if __name__ == "__main__":
    main()
