from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants
import pytest

from baton.engine.models.checkpoint import resolve_checkpoint
from baton.engine.models.download_progress import DownloadLines, progress_class

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {"config.json": b"{}", "model.safetensors": bytes(300_000)}


class _Hub(BaseHTTPRequestHandler):
    """Just enough of the hub for one model of `FILES`."""

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def _answer(self, *, with_body: bool) -> None:
        body = FILES.get(self.path.rpartition("/")[2])
        if body is None:
            siblings = [{"rfilename": name} for name in FILES]
            tree = [{"type": "file", "path": name, "size": len(data), "oid": COMMIT} for name, data in FILES.items()]
            is_tree = "/tree/" in self.path
            body = json.dumps(tree if is_tree else {"id": "a/b", "sha": COMMIT, "siblings": siblings}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json")
        self.send_header("ETag", f'"{len(body)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if with_body:
            self.wfile.write(body)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    files = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    yield
    server.shutdown()
    server.server_close()


@pytest.mark.usefixtures("hub")
def test_a_download_of_the_hub_is_shown_in_lines_off_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(DownloadLines, "interval_s", 0.0)
    folder = resolve_checkpoint("a/b")
    assert (folder / "model.safetensors").stat().st_size == 300_000
    shown = capsys.readouterr().err
    assert all(re.match(r".+: \S+ of \S+ \[", line) for line in shown.splitlines())
    assert " of 300k [" in shown
    assert "\r" not in shown


@pytest.mark.usefixtures("hub")
def test_a_download_that_is_over_at_once_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    resolve_checkpoint("a/b")
    assert capsys.readouterr().err == ""


def test_there_is_one_line_in_each_interval(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now_s[0])
    with DownloadLines(total=400, desc="Downloading", unit="B", unit_scale=True) as bar:
        for second in range(14):
            now_s[0], bar.n = second, 30 * second
            bar.refresh()
        now_s[0], bar.n = 60.0, 400
    assert [line.partition(" [")[0] for line in capsys.readouterr().err.splitlines()] == [
        "Downloading: 150 of 400",
        "Downloading: 300 of 400",
    ]


def test_on_a_terminal_the_bars_are_the_hub_clients_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert progress_class() is DownloadLines
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert progress_class() is None


def test_who_wants_no_progress_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    assert progress_class() is None
