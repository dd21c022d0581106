"""How `python -m tests.clients` plays the model of coding agents."""

from __future__ import annotations

import json

import pytest

from tests.clients.coding_agents import COMMAND, RESULT, CodingAgent, run_coding_agent
from tests.clients.coding_server import CALLS, working
from tests.clients.programs import NotInstalled


@pytest.mark.parametrize("name", CALLS)
def test_the_tool_that_is_offered_is_called_with_the_command(name: str) -> None:
    answer = working(f'read{{"type": "object"}};{name}{{"type": "object"}};[user]go[assistant]')
    call = json.loads(answer.partition("<tool_call>")[2].partition("</tool_call>")[0])
    assert call["name"] == name
    assert COMMAND in json.dumps(call["arguments"])


def test_what_the_command_wrote_is_told_and_a_prompt_without_tools_gets_a_text() -> None:
    assert working(f'Bash{{"type": "object"}};[tool]{RESULT}[assistant]<think>').endswith(f"{RESULT}.")
    assert "tool_call" not in working("[user]Name this conversation.[assistant]")


def test_an_agent_that_is_not_there_is_not_installed() -> None:
    with pytest.raises(NotInstalled):
        run_coding_agent(CodingAgent("absent", ""), "/nonexistent/agent", "python")
