"""One loop of several steps with tools, as an agent runs it, through the whole relay."""

from __future__ import annotations

from tests.clients.libraries import tool_loop
from tests.system.harness import Relay


def test_an_agent_loops_until_it_has_its_answer(llama_relay: Relay) -> None:
    tool_loop(llama_relay.client, llama_relay.client.models.list().data[0].id)
    llama_relay.settle()
