"""What programs say is plain English: their errors, their logs and their `--help`."""

from __future__ import annotations

from pathlib import Path

from tests.prose.messages import faults_in, help_texts, messages_of

ROOT = Path(__file__).parents[2]
SOURCES = ("baton", "bench", "decode_node", "kvtransfer", "prefill_node", "router")


def test_errors_and_logs_are_plain_english() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{line}": (message, faults)
        for folder in SOURCES
        for path in (ROOT / folder).rglob("*.py")
        for line, message in messages_of(path)
        if (faults := faults_in(message))
    }
    assert found == {}


def test_the_help_on_settings_and_fields_is_plain_english() -> None:
    assert {name: text for name, text in help_texts().items() if faults_in(text)} == {}


def test_messages_are_found(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        'raise InvalidSetting(f"--port {port}: who listens")\n_log.warning("late by %d s", 3)\nprint("no")\n'
    )
    assert list(messages_of(module)) == [(1, "--port VALUE: who listens"), (2, "late by %d s")]
    assert faults_in("the node is gone; who asks is told") == ["begins with who or what"]
    assert faults_in("word " * 26) == ["26 words, 25 at most"]
