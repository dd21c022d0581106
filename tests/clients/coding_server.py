"""`python -m tests.clients.coding_server`: a router whose nodes do the task of `coding_agents.py` by a script.

Prints its address and the name of its model as one line, and serves until it is told to stop. The model calls functions
as Hermes writes them, and thinks before each answer.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys

from baton.demo.location import checkpoint_path
from baton.router.http.openai.prompts import PromptMaker
from baton.wire.messages.membership import DECODE, PREFILL
from tests.clients.coding_agents import COMMAND, RESULT
from tests.router.conversations import THOUGHT, choosing, conversing
from tests.router.rig import MODEL

MAX_REQUEST_TOKENS = 200_000
CALLS = {
    "Bash": {"command": COMMAND, "description": "Six times seven"},
    "exec_command": {"cmd": COMMAND},
    "shell_command": {"command": COMMAND},
    "shell": {"command": ["bash", "-c", COMMAND]},
    "run_shell_command": {"command": COMMAND, "is_background": False},
}
"""The arguments of the tools for commands, by the names that agents give these."""


def working(prompt: str) -> str:
    """Call the tool for commands that the prompt offers, then tell what the command wrote."""
    if RESULT in prompt:
        text = f"The file says: {RESULT}."
    else:
        name = max((name for name in CALLS if f"{name}{{" in prompt), key=len, default="")
        call = json.dumps({"name": name, "arguments": CALLS[name]}) if name else ""
        text = f"<tool_call>\n{call}\n</tool_call>" if call else "A sum in a file."
    return (THOUGHT + text).removeprefix("<think>" if prompt.endswith("<think>") else "")


async def main() -> None:
    """Serve until SIGINT or SIGTERM."""
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    prompts = PromptMaker.from_folder(checkpoint_path())
    async with conversing(prompts) as server:
        for role in (PREFILL, DECODE):
            await server.rig.join(role, choosing(prompts, working), max_request_tokens=MAX_REQUEST_TOKENS)
        sys.stdout.write(f"{server.url} {MODEL}\n")
        sys.stdout.flush()
        await stopped.wait()


if __name__ == "__main__":
    asyncio.run(main())
