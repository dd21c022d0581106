"""Coding agents as their users start them: a task in an empty folder, with all of their tools, against a router whose
nodes have a script instead of a model (`coding_server.py`): their prompts have 9,000 tokens and more, the demo model
takes 2,048.

The script calls the agent's own tool for commands once, reads in the next prompt what the command wrote, and ends with
a text. An agent has passed when the command has run in the folder and the text is what it prints. Its home is a folder
of its own, so that nothing that its user has set is read or changed.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.clients.programs import NotInstalled

ROOT = Path(__file__).parents[2]
TASK = "Compute six times seven with the shell, write it into done.txt, and say what the file says."
COMMAND = "echo $((6 * 7)) relays > done.txt && cat done.txt"
RESULT = "42 relays"
"""What the command writes. It stands in no prompt before it has run."""
TIMEOUT_S = 120.0
END_S = 20.0


@dataclass(frozen=True, slots=True)
class CodingAgent:
    """`{url}` and `{model}` in `arguments` and `environment` are filled in, and `{task}`."""

    command: str
    arguments: str
    environment: Mapping[str, str] = field(default_factory=dict)


CODING_AGENTS = (
    CodingAgent(
        "claude",
        "-p {task} --allowedTools Bash",
        {
            "ANTHROPIC_BASE_URL": "{url}",
            "ANTHROPIC_AUTH_TOKEN": "KEY",
            "ANTHROPIC_MODEL": "{model}",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
    ),
    CodingAgent(
        "codex",
        "exec --skip-git-repo-check --sandbox danger-full-access -m {model} -c model_provider=baton"
        """ -c 'model_providers.baton={{name="baton",base_url="{url}/v1",wire_api="responses"}}' {task}""",
    ),
    CodingAgent(
        "qwen",
        "--auth-type openai --approval-mode yolo -p {task}",
        {"OPENAI_BASE_URL": "{url}/v1", "OPENAI_API_KEY": "KEY", "OPENAI_MODEL": "{model}"},
    ),
)


def run_coding_agent(agent: CodingAgent, executable: str, server_python: str) -> None:
    """Give it the task, and judge what it has done. Raises `NotInstalled`, `ValueError`, `OSError` and, after two
    minutes, `subprocess.TimeoutExpired`."""
    found = shutil.which(executable)
    if found is None:
        raise NotInstalled(executable)
    with _server(server_python) as (url, model), tempfile.TemporaryDirectory() as home:
        folder = Path(home, "project")
        folder.mkdir()
        names = {"url": url, "model": model, "task": shlex.quote(TASK)}
        environment = {name: value.format(**names) for name, value in agent.environment.items()}
        command = [str(Path(found).absolute()), *shlex.split(agent.arguments.format(**names))]
        done = subprocess.run(
            command,
            cwd=folder,
            env={"PATH": os.environ["PATH"], "HOME": home, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        written = (folder / "done.txt").read_text() if (folder / "done.txt").exists() else ""
    if done.returncode != 0 or written.strip() != RESULT or RESULT not in done.stdout:
        said = f"{done.stdout[-600:]}\n{done.stderr[-600:]}"
        raise ValueError(f"exit status {done.returncode}, done.txt has {written!r}; it said: {said}")


@contextlib.contextmanager
def _server(python: str) -> Iterator[tuple[str, str]]:
    """URL and model of a router that does the task."""
    command = [python, "-m", "tests.clients.coding_server"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url, _, model = process.stdout.readline().strip().partition(" ")
        if not url:
            raise ValueError("the server did not start")
        yield url, model
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(END_S)
