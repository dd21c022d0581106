from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from launch.api_client import ApiClient
from launch.chat import ChatSettings, Conversation, printable
from tests.launch.endpoint import FakeEndpoint
from tests.launch.supervised import ROOT

TIMEOUT_S = 60.0


def piped(endpoint: FakeEndpoint, text: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "baton", "chat", f"--url={endpoint.url}", *flags]
    return subprocess.run(command, input=text, capture_output=True, text=True, cwd=ROOT, timeout=TIMEOUT_S, check=False)


def roles_and_texts(body: dict[str, list[dict[str, str]]]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in body["messages"]]


def test_each_piped_line_is_a_turn_of_one_conversation(endpoint: FakeEndpoint) -> None:
    finished = piped(endpoint, "one\n\ntwo\n", "--system=Be brief.", "--max-tokens=9", "--temperature=0")
    assert finished.stdout == "You said one.\nYou said two.\n"
    assert finished.returncode == 0
    first, second = endpoint.bodies
    assert (first["model"], first["max_tokens"], first["temperature"]) == ("tiny", 9, 0.0)
    assert roles_and_texts(second) == [
        ("system", "Be brief."),
        ("user", "one"),
        ("assistant", "You said one."),
        ("user", "two"),
    ]


def test_a_piped_conversation_ends_at_an_error(endpoint: FakeEndpoint) -> None:
    finished = piped(endpoint, "refuse\nnever sent\n")
    assert finished.returncode == 1
    assert finished.stderr == "error: temperature must be at most 2 (HTTP 400)\n"
    assert len(endpoint.bodies) == 1


def test_commands_work_in_piped_input(endpoint: FakeEndpoint) -> None:
    assert piped(endpoint, "one\n/reset\ntwo\n/exit\nthree\n").returncode == 0
    assert [roles_and_texts(body) for body in endpoint.bodies] == [[("user", "one")], [("user", "two")]]


def test_an_answer_cut_off_by_the_token_limit_says_so(endpoint: FakeEndpoint) -> None:
    assert piped(endpoint, "long\n").stdout == "You said long.\n(the answer was cut off at the token limit)\n"


def test_a_failed_turn_is_forgotten_and_a_partial_answer_kept(endpoint: FakeEndpoint) -> None:
    conversation = Conversation(ApiClient(endpoint.url), "tiny", ChatSettings())
    for wish in ("refuse", "break"):
        with pytest.raises(Exception, match=r"temperature|ended"):
            list(conversation.answer(wish))
    list(conversation.answer("again"))
    assert roles_and_texts(endpoint.bodies[-1]) == [("user", "break"), ("assistant", "You said "), ("user", "again")]


def test_control_characters_of_an_answer_do_not_reach_the_terminal() -> None:
    assert printable("a\x1b]0;title\x07b\r\x9bc\n\td é 👩‍🚀") == "a]0;titlebc\n\td é 👩‍🚀"


@dataclass
class Terminal:
    """A chat on a pseudo terminal."""

    process: subprocess.Popen[bytes]
    descriptor: int
    seen: bytes = b""

    def type(self, line: str) -> None:
        os.write(self.descriptor, line.encode() + b"\n")

    def read_until(self, text: str) -> None:
        while text.encode() not in self.seen:
            self.seen += os.read(self.descriptor, 4096)
        self.seen = self.seen.split(text.encode(), 1)[1]


@pytest.fixture
def terminal(endpoint: FakeEndpoint) -> Iterator[Terminal]:
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "baton", "chat", f"--url={endpoint.url}"]
    process = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, cwd=ROOT, env={**os.environ, "TERM": "dumb"}
    )
    os.close(slave)
    yield Terminal(process, master)
    process.kill()
    process.wait()
    os.close(master)


def test_ctrl_c_stops_the_answer_and_a_second_one_leaves(terminal: Terminal, endpoint: FakeEndpoint) -> None:
    terminal.read_until("> ")
    terminal.type("hang")
    terminal.read_until("You said ")
    terminal.process.send_signal(signal.SIGINT)
    terminal.read_until("(stopped)")
    assert endpoint.client_left.wait(TIMEOUT_S)
    terminal.read_until("> ")
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.process.wait(TIMEOUT_S) == 130


def test_an_error_does_not_end_a_conversation_in_the_terminal(terminal: Terminal) -> None:
    terminal.read_until("> ")
    terminal.type("fail")
    terminal.read_until("error: both nodes died")
    terminal.type("/nonsense")
    terminal.read_until("unknown command /nonsense")
    terminal.type("hello")
    terminal.read_until("You said hello.")
    terminal.type("/exit")
    assert terminal.process.wait(TIMEOUT_S) == 0
