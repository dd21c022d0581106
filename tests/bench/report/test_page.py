from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from baton.bench.report.command import main
from tests.bench.report.samples import LIMITS, OF_A_TRACE, SWEEP, published, run_result

_VOID = {"meta", "img", "br", "link"}
EVIL = "<script>alert('1')</script>\"&"


class Page(HTMLParser):
    """Tags and their attributes; fails where a tag is closed that is not open."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def page(folder: Path, *documents: dict[str, Any]) -> tuple[Page, str]:
    files = []
    for number, document in enumerate(documents):
        path = folder / f"file{number}.json"
        path.write_text(json.dumps(document))
        files.append(str(path))
    assert main([*files, "--html", str(folder / "out.html")]) == 0
    text = (folder / "out.html").read_text()
    return Page(text), text


def test_a_page_of_everything_is_whole_and_needs_nothing_else(tmp_path: Path) -> None:
    found, text = page(tmp_path, published(OF_A_TRACE), published(SWEEP), published(LIMITS))
    assert len([tag for tag, _ in found.tags if tag == "section"]) == 3
    assert not [tag for tag, _ in found.tags if tag in ("script", "link", "iframe", "object")]
    for _, attributes in found.tags:
        for name in ("src", "href"):
            assert (attributes.get(name) or "#").startswith(("data:", "#"))
    assert "url(" not in text
    assert len(text) < 2_000_000
    assert "prefers-color-scheme:dark" in text


def test_what_comes_from_a_file_cannot_become_markup(tmp_path: Path) -> None:
    document = published(OF_A_TRACE)
    for run in document["runs"]:
        run["result"] |= {
            "model_id": EVIL,
            "notes": [EVIL],
            "failed": 1,
            "failures": {EVIL: 1},
            "failure_messages": [f"{EVIL}: {EVIL}"],
            "dataset": {EVIL: EVIL},
        }
        run["target"] = f"{EVIL}{run['target']}"
    for target in document["targets"]:
        target |= {"name": f"{EVIL}{target['name']}", "command": EVIL, "pinning": [EVIL]}
    document["facts"] = {name: EVIL if isinstance(value, str) else value for name, value in document["facts"].items()}
    document["facts"]["versions"] = {EVIL: EVIL}
    document |= {"notes": [EVIL]}
    found, text = page(tmp_path, document)
    assert "<script" not in text
    assert not [tag for tag, _ in found.tags if tag == "script"]
    assert found.text.count(EVIL) > 20


def test_pictures_go_into_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(run_result() | {"request_rate": "inf"}))
    assert main([str(path), "--png", str(tmp_path / "deep" / "er")]) == 0
    written = sorted((tmp_path / "deep" / "er").iterdir())
    assert [each.name for each in written] == ["mine-gaps.png"]
    assert all(each.read_bytes().startswith(b"\x89PNG") for each in written)
    assert "mine-gaps.png" in capsys.readouterr().out


def test_alone_it_prints_the_tables_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "limits.json"
    ceilings = [
        {"name": "memcpy", "value": 12.4, "unit": "GB/s", "spread": 0.06, "note": "1 thread, nothing beside"},
        {"name": "bf16 GEMM", "value": 208.0, "unit": "GFLOP/s", "spread": 0.21},
    ]
    path.write_text(json.dumps(published(LIMITS) | {"ceilings": ceilings, "failures": ["it broke"]}))
    assert main([str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "note: it broke" in lines
    # words to the left, numbers to the right, a sentence that begins with a number is words
    at = lines.index("**What the machine can do**", 1)
    assert lines[at + 2 : at + 6] == [
        "| ceiling   |       found | spread | note                     |",
        "| --------- | ----------: | -----: | ------------------------ |",
        "| memcpy    |   12.4 GB/s |    6 % | 1 thread, nothing beside |",
        "| bf16 GEMM | 208 GFLOP/s |   21 % |                          |",
    ]
