"""`python -m bench.publish`: writes docs/benchmarks.md, its pictures and its reports from bench/results.

`--check` writes nothing, and fails where the page is not what the results say.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.facts import ROOT
from bench.output_file import write_file
from bench.plots.style import as_png
from bench.publish.page import Page, read_page, text_of
from bench.report.command import page_of as report_of
from wire.errors import BatonError

PAGE = "benchmarks.md"


def main(arguments: Sequence[str]) -> int:
    """Write, or check: 1 when the page differs or a file beside it is missing. Raises `InvalidSetting`."""
    parser = argparse.ArgumentParser(prog="python -m bench.publish", description=__doc__, allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 when the page is not right")
    parser.add_argument("--results", default=ROOT / "bench/results", type=Path, help="folder with contents.yaml")
    parser.add_argument("--docs", default=ROOT / "docs", type=Path, help="folder of the page")
    flags = parser.parse_args(arguments)
    page = read_page(flags.results)
    if flags.check:
        wrong = wrong_files(page, flags.docs)
        for path in wrong:
            print(f"{path} is not what the results say: run python -m bench.publish")
        return 1 if wrong else 0
    for path in publish(page, flags.docs):
        print(path)
    return 0


def wrong_files(page: Page, docs: Path) -> list[Path]:
    """The page where it differs, and what it links to that is not there."""
    path = docs / PAGE
    is_right = path.is_file() and path.read_text(encoding="utf-8") == text_of(page)
    linked = [docs / part.picture_path(picture) for part in page.parts for picture in part.pictures]
    linked += [docs / part.entry.html for part in page.parts if part.entry.html]
    return ([] if is_right else [path]) + [path for path in linked if not path.is_file()]


def publish(page: Page, docs: Path) -> list[Path]:
    """Write everything; returns the paths. Raises `InvalidSetting`."""
    files: dict[Path, str | bytes] = {docs / PAGE: text_of(page)}
    for part in page.parts:
        files |= {docs / part.picture_path(picture): as_png(picture.draw()) for picture in part.pictures}
        if part.entry.html and part.section:
            files[docs / part.entry.html] = report_of(part.entry.title, [part.section])
    return [write_file(path, content, makes_folder=True) for path, content in files.items()]


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except BatonError as error:
        sys.exit(f"error: {error}")
