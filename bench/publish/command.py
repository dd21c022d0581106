"""`python -m bench.publish`: writes docs/benchmarks.md, its pictures and its reports from bench/results.

`--check` writes nothing, and fails where the page is not what the results say.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench.facts import ROOT
from bench.plots.style import as_png
from bench.publish.contents import read_contents
from bench.publish.page import Part, page_of, parts_of, picture_path
from bench.report.command import write
from bench.report.page import page_of as report_of

PAGE = "benchmarks.md"


def main(arguments: Sequence[str]) -> int:
    """Write, or check: 1 when the page differs or a file beside it is missing. Raises `InvalidSetting`."""
    parser = argparse.ArgumentParser(prog="python -m bench.publish", description=__doc__, allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 when the page is not right")
    parser.add_argument("--results", default=ROOT / "bench/results", type=Path, help="folder with contents.yaml")
    parser.add_argument("--docs", default=ROOT / "docs", type=Path, help="folder of the page")
    flags = parser.parse_args(arguments)
    parts = parts_of(read_contents(flags.results / "contents.yaml"), flags.results)
    text = page_of(parts, flags.results)
    if flags.check:
        wrong = wrong_files(parts, text, flags.docs)
        for path in wrong:
            print(f"{path} is not what the results say: run python -m bench.publish")
        return 1 if wrong else 0
    for path in publish(parts, text, flags.docs):
        print(path)
    return 0


def wrong_files(parts: Sequence[Part], text: str, docs: Path) -> list[Path]:
    """The page where it differs, and what it links to that is not there."""
    page = docs / PAGE
    is_right = page.is_file() and page.read_text(encoding="utf-8") == text
    linked = [docs / picture_path(part, picture) for part in parts for picture in part.pictures]
    linked += [docs / part.entry.html for part in parts if part.entry.html]
    return ([] if is_right else [page]) + [path for path in linked if not path.is_file()]


def publish(parts: Sequence[Part], text: str, docs: Path) -> list[Path]:
    """Write everything; returns the paths. Raises `InvalidSetting`."""
    files = {docs / PAGE: text.encode()}
    for part in parts:
        files |= {docs / picture_path(part, picture): as_png(picture.draw()) for picture in part.pictures}
        if part.entry.html and part.section:
            files[docs / part.entry.html] = report_of(part.entry.title, [part.section]).encode()
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, content)
    return list(files)
