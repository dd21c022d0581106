from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from baton.launch.api_client import ApiClient
from baton.launch.chat import Screen, join_lines, printable
from baton.launch.chat_commands import HELP, MAX_FILE_BYTES, ChatCommands
from baton.launch.conversation import AnswerFigures, Conversation
from baton.wire.errors import InvalidRequest
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


def test_a_question_is_answered_alone(endpoint: FakeEndpoint) -> None:
    finished = piped(endpoint, "never read\n", "/retry what?", "--system=Be brief.")
    assert (finished.stdout, finished.returncode) == ("You said /retry what?.\n", 0)
    assert [roles_and_texts(body) for body in endpoint.bodies] == [[("system", "Be brief."), ("user", "/retry what?")]]
    refused = piped(endpoint, "", "refuse")
    assert (refused.stderr, refused.returncode) == ("error: temperature must be at most 2 (HTTP 400)\n", 1)


def test_a_piped_conversation_ends_at_an_error(endpoint: FakeEndpoint) -> None:
    finished = piped(endpoint, "refuse\nnever sent\n")
    assert finished.returncode == 1
    assert finished.stderr == "error: temperature must be at most 2 (HTTP 400)\n"
    assert len(endpoint.bodies) == 1


def test_commands_work_in_piped_input(endpoint: FakeEndpoint) -> None:
    assert piped(endpoint, "one\n/reset\ntwo\n/exit\nthree\n").returncode == 0
    assert [roles_and_texts(body) for body in endpoint.bodies] == [[("user", "one")], [("user", "two")]]


def test_piped_input_is_read_as_what_is_typed(endpoint: FakeEndpoint) -> None:
    finished = piped(endpoint, '/retry\n/help\n/nonsense\n"""one\ntwo"""\n/retry\n')
    answer = "You said one\ntwo.\n"
    assert finished.stdout == f"{HELP}\n{answer}{answer}"
    retry, nonsense = finished.stderr.splitlines()
    assert retry == "error: nothing has been asked yet"
    assert nonsense.startswith("error: unknown command /nonsense")
    assert finished.returncode == 0


def test_an_answer_cut_off_by_the_token_limit_says_so(endpoint: FakeEndpoint) -> None:
    finished = piped(endpoint, "long\n")
    assert finished.stdout == "You said long.\n"  # a script reads it
    assert finished.stderr == "(the answer was cut off at the token limit)\n"


def test_a_failed_turn_is_forgotten_and_a_partial_answer_kept(endpoint: FakeEndpoint) -> None:
    conversation = Conversation(ApiClient(endpoint.url), "tiny")
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
def terminal(endpoint: FakeEndpoint, tmp_path: Path) -> Iterator[Terminal]:
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "baton", "chat", f"--url={endpoint.url}"]
    process = subprocess.Popen(
        command,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        cwd=ROOT,
        env={**os.environ, "TERM": "dumb", "XDG_STATE_HOME": str(tmp_path)},
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


def test_an_error_does_not_end_a_conversation_in_the_terminal(terminal: Terminal, tmp_path: Path) -> None:
    terminal.read_until("> ")
    terminal.type("fail")
    terminal.read_until("error: both nodes died")
    terminal.type("/nonsense")
    terminal.read_until("unknown command /nonsense")
    terminal.type("hello \\")
    terminal.read_until(". ")
    terminal.type("you")
    terminal.read_until("You said hello \r\nyou.")
    terminal.read_until("(7 tokens, ")
    terminal.type("/file /nowhere")
    terminal.read_until("error: /nowhere cannot be read: No such file or directory")
    terminal.type("/exit")
    assert terminal.process.wait(TIMEOUT_S) == 0
    history = tmp_path / "baton" / "chat_history"
    assert "hello" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0


@pytest.fixture
def conversation(endpoint: FakeEndpoint) -> Conversation:
    return Conversation(ApiClient(endpoint.url), "tiny", "Be brief.")


def test_reasoning_is_dimmed_on_a_terminal_and_never_told_again(
    endpoint: FakeEndpoint, conversation: Conversation, capsys: pytest.CaptureFixture[str]
) -> None:
    Screen(True, {"TERM": "xterm"}).show(conversation, "think")
    shown = capsys.readouterr().out
    assert shown.startswith("\x1b[2mLet me see\x1b[0m\x1b[2m.\x1b[0m\nYou said think.\n\x1b[2m(7 tokens, ")
    Screen(True, {"TERM": "xterm", "NO_COLOR": "1"}).show(conversation, "think")
    assert capsys.readouterr().out.startswith("Let me see.\nYou said think.\n(7 tokens, ")
    Screen(False, {"TERM": "xterm"}).show(conversation, "think")
    assert capsys.readouterr().out == "You said think.\n"
    assert "Let me see" not in str(endpoint.bodies[-1])


def test_the_speed_is_that_after_the_first_token() -> None:
    figures = AnswerFigures(10.0, num_tokens=41)
    assert figures.describe() == ""
    for now_s in (10.5, 11.0, 14.5):
        figures.note_part(now_s)
    assert figures.describe() == "41 tokens, 10.0 tokens/s, the first after 0.50 s"
    figures.num_tokens = None
    assert figures.describe() == "about 3 tokens, 0.5 tokens/s, the first after 0.50 s"


def test_the_last_question_can_be_asked_again(endpoint: FakeEndpoint, conversation: Conversation) -> None:
    commands = ChatCommands(conversation)
    with pytest.raises(InvalidRequest, match="nothing has been asked"):
        commands.run("/retry")
    list(conversation.answer("one"))
    reply = commands.run("/retry")
    assert reply is not None
    list(conversation.answer(reply.asks))
    assert roles_and_texts(endpoint.bodies[-1]) == [("system", "Be brief."), ("user", "one")]


def test_system_prompt_and_model_can_be_changed(endpoint: FakeEndpoint, conversation: Conversation) -> None:
    commands = ChatCommands(conversation)
    assert commands.run("/system Be long.") == ("the system prompt is set", "")
    assert conversation.messages == [{"role": "system", "content": "Be long."}]
    commands.run("/system")
    assert conversation.messages == []
    assert commands.run("/model") == ("* tiny", "")
    with pytest.raises(InvalidRequest, match="huge is not served here; there is tiny"):
        commands.run("/model huge")
    assert conversation.model == "tiny"


def test_thinking_is_asked_for_and_left_to_the_model(endpoint: FakeEndpoint, conversation: Conversation) -> None:
    commands = ChatCommands(conversation)
    for argument in ("on", "off", ""):
        assert commands.run(f"/think {argument}") is not None
        list(conversation.answer("one"))
    with pytest.raises(InvalidRequest, match="/think on"):
        commands.run("/think hard")
    wishes = [body.get("chat_template_kwargs") for body in endpoint.bodies]
    assert wishes == [{"enable_thinking": True}, {"enable_thinking": False}, None]


def test_a_file_goes_with_the_next_message_only(conversation: Conversation, tmp_path: Path) -> None:
    commands, path = ChatCommands(conversation), tmp_path / "notes.txt"
    path.write_text("a\nb\n")
    commands.run(f"/file {path}")
    assert commands.with_file("What is this?") == "notes.txt:\n\na\nb\n\nWhat is this?"
    assert commands.with_file("And now?") == "And now?"
    for content, reason in ((b"\xff\xfe", "not text"), (b"x" * (MAX_FILE_BYTES + 1), "larger than")):
        path.write_bytes(content)
        with pytest.raises(InvalidRequest, match=reason):
            commands.run(f"/file {path}")
    for wrong in ("/file", f"/file {tmp_path}", "/file a\0b"):
        with pytest.raises(InvalidRequest):
            commands.run(wrong)
    assert commands.with_file("And now?") == "And now?"


def test_a_conversation_is_saved_and_no_file_overwritten(conversation: Conversation, tmp_path: Path) -> None:
    commands = ChatCommands(conversation)
    list(conversation.answer("one"))
    commands.run(f"/save {tmp_path}/talk.json")
    saved = json.loads((tmp_path / "talk.json").read_text())
    assert saved == {"model": "tiny", "messages": conversation.messages}
    commands.run(f"/save {tmp_path}/talk.md")
    assert "**user**\n\none\n\n**assistant**\n\nYou said one." in (tmp_path / "talk.md").read_text()
    with pytest.raises(InvalidRequest, match="File exists"):
        commands.run(f"/save {tmp_path}/talk.json")


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["one"], "one"),
        (["one \\", "two\\", "three", "never"], "one \ntwo\nthree"),
        (['"""one', "", "  two", 'three"""', "never"], "one\n\n  two\nthree"),
        (['"""', "one", '"""'], "one"),
        (['"""one"""', "never"], "one"),
        (['"""one', "two"], "one\ntwo"),
        (["one\\"], "one"),
    ],
)
def test_a_message_may_have_several_lines(typed: list[str], message: str) -> None:
    assert join_lines(iter(typed)) == message
