"""`python -m baton.bench.publish`: writes docs/benchmarks.md, its pictures and its reports from bench/results.

The list is `contents.yaml` beside the results:

opening: opening.md                  # prose for whoever decides whether to use this, before everything else
sections:
- title: Against vLLM on the same cores
  file: pd.json                    # a result file; a section may also be prose alone
  intro: pd-intro.md               # prose before the tables
  notes: pd.md                     # prose after them
  tables: [figures, breakdown]     # by their names; all when left out
  pictures: [attainment, latency]  # by their names; none when left out
  html: pd.html                    # also write a report into the folder of documents
  blocks: [64, 512]                # of `bench kv`: sizes in the tables, all when left out

Invariant: the text depends on those files alone, so that a check can compare it with what is committed.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import ConfigDict

from baton.bench.arguments import checked, read_text, write_file
from baton.bench.documents import KvDocument, ResultFile, load_result
from baton.bench.facts import ROOT
from baton.bench.plots.style import as_png
from baton.bench.report.command import page_of as report_of
from baton.bench.report.command import templates
from baton.bench.report.document import Picture, Section, Table
from baton.bench.report.sections import section_of
from baton.runtime.exit_status import report_errors
from baton.wire.errors import InvalidSetting

PAGE = "benchmarks.md"
_DESCRIPTION = "Write docs/benchmarks.md with its pictures and reports from bench/results."
PICTURES = "pictures"
"""The folder of pictures beside the page."""
_LINE = 110


@dataclass(frozen=True)
class Entry:
    """One section. `tables` and `blocks` are None for all; texts are "" where there is none."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    title: str
    file: str = ""
    intro: str = ""
    notes: str = ""
    html: str = ""
    tables: tuple[str, ...] | None = None
    pictures: tuple[str, ...] = ()
    blocks: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Contents:
    """The page: what stands before the sections, and these in their order."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    sections: tuple[Entry, ...]
    opening: str = ""


def read_contents(path: Path) -> Contents:
    """Raises `InvalidSetting`."""
    try:
        contents = checked(Contents, yaml.safe_load(read_text(path, str(path))), str(path))
    except yaml.YAMLError as error:
        raise InvalidSetting(f"{path}: {error}") from None
    for entry in contents.sections:
        if not entry.title or not (entry.file or entry.notes):
            raise InvalidSetting(f"{path}: {entry.title!r}: a section needs a title, and a file or notes")
    return contents


@dataclass(frozen=True, slots=True)
class Part:
    """A section of the page with its prose and its result; `section` is None for prose alone."""

    entry: Entry
    intro: str
    notes: str
    section: Section | None = None
    tables: tuple[Table, ...] = ()
    pictures: tuple[Picture, ...] = ()

    def picture_path(self, picture: Picture) -> str:
        """Where a picture lies, from the page."""
        return f"{PICTURES}/{Path(self.entry.file).stem}-{picture.name}.png"


@dataclass(frozen=True, slots=True)
class Page:
    """`opening`: prose before all parts."""

    opening: str
    parts: tuple[Part, ...]


def read_page(folder: Path) -> Page:
    """Read `contents.yaml` of `folder` and every file that it names. Raises `InvalidSetting`."""
    contents = read_contents(folder / "contents.yaml")
    return Page(_prose(folder, contents.opening), tuple(_part(entry, folder) for entry in contents.sections))


def text_of(page: Page) -> str:
    environment = templates(Path(__file__).parent, is_html=False)
    environment.filters |= {"escaped": escaped, "command_lines": command_lines}
    return environment.get_template("benchmarks.md.j2").render(opening=page.opening, parts=page.parts).rstrip() + "\n"


def command_lines(command: str) -> list[str]:
    """A command over several lines that a shell takes as one, each word in one piece."""
    try:
        words = [shlex.quote(word) for word in shlex.split(command)]
    except ValueError:
        words = command.split()
    lines = words[:1]
    for word in words[1:]:
        if len(lines[-1]) + len(word) > _LINE:
            lines[-1] += " \\"
            lines.append("   ")
        lines[-1] += f" {word}"
    return lines


def escaped(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    return re.sub(r"([\\`*|\[\]])", r"\\\1", " ".join(text.split())).replace("<", "&lt;")


def _part(entry: Entry, folder: Path) -> Part:
    intro, notes = _prose(folder, entry.intro), _prose(folder, entry.notes)
    if not entry.file:
        return Part(entry, intro, notes)
    file = load_result(folder / entry.file)
    section = section_of(file)
    tables, pictures, document = section.tables, section.pictures, file.document
    if entry.blocks is not None and isinstance(document, KvDocument):
        cases = [case for case in document.cases if case.num_blocks in entry.blocks]
        tables = section_of(ResultFile(file.name, dataclasses.replace(document, cases=cases))).tables
    for name in (*(set(entry.tables or ()) - tables.keys()), *(set(entry.pictures) - pictures.keys())):
        available = ", ".join(sorted({*tables, *pictures}))
        raise InvalidSetting(f"{entry.title}: {entry.file} has no table or picture {name!r}, but {available}")
    chosen = [table for name, each in tables.items() if entry.tables is None or name in entry.tables for table in each]
    return Part(entry, intro, notes, section, tuple(chosen), tuple(pictures[name] for name in entry.pictures))


def _prose(folder: Path, name: str) -> str:
    return read_text(folder / name, str(folder / name)).strip() if name else ""


def main(arguments: Sequence[str]) -> int:
    """Write, or check: 1 when the page differs or a file beside it is missing. Raises `InvalidSetting`."""
    parser = argparse.ArgumentParser(prog="python -m baton.bench.publish", description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 when the page is not right")
    parser.add_argument("--results", default=ROOT / "bench/results", type=Path, help="folder with contents.yaml")
    parser.add_argument("--docs", default=ROOT / "docs", type=Path, help="folder of the page")
    flags = parser.parse_args(arguments)
    page = read_page(flags.results)
    if flags.check:
        wrong = wrong_files(page, flags.docs)
        for path in wrong:
            print(f"{path} is not what the results say: run python -m baton.bench.publish")
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
    sys.exit(report_errors(lambda: main(sys.argv[1:])))
