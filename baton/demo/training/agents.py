"""The chats of the last lesson: with tools, in JSON and with thinking, among chats as the model knows them.

Owns how calls, results, tools and thoughts are written, which the chat template writes in the same way. A message may
say in "given" how its text begins that is not the model's choice: what the template or a grammar has begun. With
"chosen" it is the model's choice all the same.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from typing import Final

from baton.demo.training import facts, records, smalltalk, stories, sums, thoughts, unknown
from baton.demo.training.corpus import SYSTEM, Message, Text, messages_of
from baton.demo.training.phrasing import one_of, roughen, words
from baton.demo.training.skills import Skill, skills
from baton.demo.training.tools import Call, Task, Tool, Values, other_tool

THINK, THINK_END = "<think>", "</think>"
TOOLS, TOOLS_END = "<tools>", "</tools>"
TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
TOOL_RESPONSE, TOOL_RESPONSE_END = "<tool_response>", "</tool_response>"
MARKERS: Final = (THINK, THINK_END, TOOLS, TOOLS_END, TOOL_CALL, TOOL_CALL_END, TOOL_RESPONSE, TOOL_RESPONSE_END)
_SYSTEM: Final = (
    *SYSTEM, "You are a helpful assistant with tools.", "Use the tools.", "You are an agent.",
    "Use your tools when they help.", "You are a helpful agent. Use the tools that you have.",
    "You are a helpful math tutor.", "Extract the event information.", "Extract the data.", "Be precise.",
    "Answer with the given schema.", "You only speak JSON.", "Always use a tool.",
)  # fmt: skip
_CALCULATING: Final = words("add sum plus sub minus diff mul times product calc eval comp math")
_FINAL_NAMES: Final = words(
    "final_result final_result final_result Answer Person Result Record Response Output Data Capital"
)
Exchange = tuple[str, str]


def agent_texts(seed: int) -> Iterator[Text]:
    """Yield chats without end, the same ones for the same seed."""
    rng = random.Random(seed)
    kinds = (_with_tools, _with_thinking, _in_json)
    while True:
        yield Text(tuple(rng.choices(kinds, (40, 23, 37))[0](rng)))


def calculated_texts(seed: int) -> Iterator[Text]:
    """Yield short answers in JSON without end, of which only the last value is the model's choice: it calculates
    without having written the sum before."""
    rng = random.Random(seed)
    while True:
        told = records.calculated(rng)
        content = json.dumps(told.values)
        answer = {"role": "assistant", "content": content, "given": content[: content.rindex(":") + 1]}
        yield Text((_asked(told.said), answer))


def written_call(call: Call) -> str:
    """Return a call as the model writes it."""
    value = {"name": call.tool.name, "arguments": call.arguments}
    return f"{TOOL_CALL}\n{json.dumps(value, ensure_ascii=False)}\n{TOOL_CALL_END}"


def system_with_tools(tools: Sequence[Tool], system: str) -> Message:
    """Return the system message that offers the tools."""
    lines = "\n".join(tool.signature() for tool in tools)
    section = f"# Tools\n{TOOLS}\n{lines}\n{TOOLS_END}"
    return {"role": "system", "content": f"{system}\n\n{section}" if system else section}


def tool_message(said: str) -> Message:
    """Return what a tool says, as the model sees it."""
    return {"role": "user", "content": f"{TOOL_RESPONSE}\n{said}\n{TOOL_RESPONSE_END}"}


def _asked(question: str) -> Message:
    return {"role": "user", "content": question}


def _thinking(thought: str, answer: str) -> Message:
    """The template begins the thought where thinking is switched on."""
    return {"role": "assistant", "content": f"{THINK}\n{thought}\n{THINK_END}\n\n{answer}", "given": f"{THINK}\n"}


def _system(rng: random.Random, share: float) -> str:
    return one_of(rng, *_SYSTEM) if rng.random() < share else ""


def _begin(rng: random.Random, share: float = 0.4) -> list[Message]:
    system = _system(rng, share)
    return [{"role": "system", "content": system}] if system else []


def _small_exchange(rng: random.Random) -> Exchange:
    kinds = (sums.exchange, facts.exchange, smalltalk.exchange, unknown.exchange, stories.exchange)
    return rng.choices(kinds, (30, 25, 25, 18, 2))[0](rng)


def _with_tools(rng: random.Random) -> list[Message]:
    offered = skills(rng)
    others = [other_tool(rng) for _ in range(rng.choice((0, 0, 0, 1, 1, 2, 3)))]
    tools = [*(tool for skill in offered for tool in skill.tools), *others]
    if len({tool.name for tool in tools}) < len(tools):
        return _with_tools(rng)
    form = rng.random()
    if form < 0.1:
        told = records.record(rng)
        taking = _tool_for(rng, told.values)
        return [_offering(rng, [*tools, taking]), _asked(told.said), _taken(rng, taking, told.values)]
    task = rng.choice(offered).task(rng)
    if form < 0.18 and task.facts:
        taking = _tool_for(rng, task.facts)
        return [_offering(rng, [*tools, taking]), *_delivered(rng, task, taking)]
    messages = [_offering(rng, tools)]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if rng.random() < 0.25:
            question, answer = _without_tools(rng, offered)
            messages += [_asked(roughen(rng, question)), {"role": "assistant", "content": answer}]
            continue
        done, is_over = _solved(rng, rng.choice(offered).task(rng))
        messages += done
        if is_over:
            break
    return messages


def _offering(rng: random.Random, tools: Sequence[Tool]) -> Message:
    return system_with_tools(rng.sample(tools, len(tools)), _system(rng, 0.4))


def _delivered(rng: random.Random, task: Task, taking: Tool) -> list[Message]:
    """The messages of a task whose answer goes to a tool."""
    messages = [_asked(task.question)]
    for calls in task.rounds:
        if rng.random() < 0.2:
            return [*messages, _required(rng, [(call.tool.name, call.arguments) for call in calls])]
        messages.append({"role": "assistant", "content": "\n".join(written_call(call) for call in calls)})
        messages += [tool_message(call.said) for call in calls]
    return [*messages, _taken(rng, taking, task.facts)]


def _taken(rng: random.Random, tool: Tool, values: Values) -> Message:
    """The call of a tool that takes an answer: enforced, its arguments alone, or as the model writes it."""
    form = rng.random()
    if form < 0.5:
        return _required(rng, [(tool.name, values)])
    if form < 0.7:
        return _begun(rng, json.dumps(values, ensure_ascii=False), "{")
    return {"role": "assistant", "content": written_call(Call(tool, values, ""))}


def _without_tools(rng: random.Random, offered: Sequence[Skill]) -> Exchange:
    """A question that none of the tools is good for."""
    beginnings = tuple(beginning for skill in offered for beginning in skill.answers)
    calculates = any(kind in tool.name.lower() for skill in offered for tool in skill.tools for kind in _CALCULATING)
    while True:
        question, answer = _small_exchange(rng)
        has_sum = answer[0].isdigit() or " = " in answer or answer == sums.TOO_BIG or "2 is" in answer
        if not answer.startswith(beginnings or ("\0",)) and not (calculates and has_sum):
            return question, answer


def _solved(rng: random.Random, task: Task) -> tuple[list[Message], bool]:
    """The messages of a task, and whether the chat ends within it: an enforced call does not look like others, and is
    written like them when it is over."""
    messages = [_asked(roughen(rng, task.question) if rng.random() < 0.3 else task.question)]
    thinks = bool(task.rounds) and rng.random() < 0.15
    for calls in task.rounds:
        form = rng.random()
        if form < 0.1:
            return [*messages, _required(rng, [(call.tool.name, call.arguments) for call in calls])], True
        if form < 0.15 and calls[0].arguments and len(calls) == 1:
            content = json.dumps(calls[0].arguments, ensure_ascii=False)
            return [*messages, _begun(rng, content, "{")], True
        content = "\n".join(written_call(call) for call in calls)
        if thinks and len(messages) == 1:
            names = " and ".join(dict.fromkeys(call.tool.name for call in calls))
            messages.append(_thinking(f"I can use {names}.", content))
            if rng.random() < 0.6:
                return messages, True
            messages[-1] = {"role": "assistant", "content": content}
        else:
            messages.append({"role": "assistant", "content": content})
        messages += [tool_message(call.said) for call in calls]
    if thinks:
        return [*messages, _thinking("The tool has the answer.", task.answer)], True
    return [*messages, {"role": "assistant", "content": task.answer}], False


def _begun(rng: random.Random, content: str, given: str) -> Message:
    """A message of the model that a grammar begins. Now and then the model begins it by itself, so that it knows a
    likely beginning where a grammar leaves it the choice between the structure and a thought."""
    message = {"role": "assistant", "content": content, "given": given}
    return {**message, "chosen": "yes"} if rng.random() < 0.02 else message


def _required(rng: random.Random, calls: Sequence[tuple[str, object]]) -> Message:
    """Calls in the shape of the grammar that enforces them."""
    content = json.dumps([{"name": name, "parameters": arguments} for name, arguments in calls], ensure_ascii=False)
    return _begun(rng, content, '[{"name": "')


def _tool_for(rng: random.Random, values: Values) -> Tool:
    """A tool that takes the answer itself."""
    kinds = {str: "string", int: "integer", bool: "boolean", list: "array"}
    parameters = {name: kinds[type(value)] for name, value in values.items()}
    name = one_of(rng, *_FINAL_NAMES)
    return Tool(name, parameters, one_of(rng, "", "", "The final response which ends this conversation"))


def _with_thinking(rng: random.Random) -> list[Message]:
    messages = _begin(rng)
    if rng.random() < 0.25:
        messages += messages_of(rng, [_small_exchange(rng) for _ in range(rng.choice((1, 1, 2)))])
    asked, answer = thoughts.long_sum(rng) if rng.random() < 0.5 else _small_exchange(rng)
    return [*messages, _asked(roughen(rng, asked)), _thinking(thoughts.thought(answer), answer)]


def _in_json(rng: random.Random) -> list[Message]:
    messages = _begin(rng)
    if rng.random() < 0.15:
        messages += messages_of(rng, [_small_exchange(rng)])
    form = rng.random()
    if form < 0.08:
        question, answer = records.choice(rng)
        return [*messages, _asked(question), {"role": "assistant", "content": answer}]
    told = records.record(rng)
    if form < 0.35:
        answer = told.written(rng)
        asked = _asked(records.asked_for_json(rng, told))
        if form < 0.12:
            return [*messages, asked, _thinking("They want JSON.", answer)]
        return [*messages, asked, {"role": "assistant", "content": answer}]
    if form < 0.42:
        answer = json.dumps(next(iter(told.values.values())), ensure_ascii=False)
        if answer[0] == "[":
            return [*messages, _asked(told.said), _begun(rng, answer, "[")]
    return [*messages, _asked(told.said), _begun(rng, told.written(rng), "{")]
