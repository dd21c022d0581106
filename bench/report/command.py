"""`baton bench report`: result files as one HTML page that needs nothing else, as pictures, or as Markdown tables.

Draws from the files alone; measures nothing. What comes from a file is escaped by jinja2. Pictures are SVG in data
URIs, where they cannot reach the page.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path

import jinja2

from baton.bench.arguments import write_file
from baton.bench.documents import load_result
from baton.bench.plots.style import as_png, as_svg
from baton.bench.report.document import Section, as_text
from baton.bench.report.sections import section_of
from baton.runtime.command_line import CommandParser


def page_of(title: str, sections: Sequence[Section]) -> str:
    """The whole page; a name that the template does not know is an error. Figures are drawn here."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["as_svg"] = lambda picture: as_svg(picture.draw()).encode()
    environment.filters["base64"] = lambda content: base64.b64encode(content).decode()
    return environment.get_template("page.html.j2").render(title=title, sections=sections)


def main(arguments: Sequence[str]) -> int:
    """Write what was asked for. Raises `InvalidSetting` for files that cannot be read or written."""
    parser = CommandParser(
        prog="baton bench report",
        description="One self-contained HTML page, and pictures, from result files of `baton bench` serve, compare, "
        "sweep, limits and kv; without either their tables in Markdown.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="result files, in the order of the page's sections")
    parser.add_argument("--html", metavar="OUT", help="file for the page")
    parser.add_argument("--png", metavar="FOLDER", help="folder for the pictures, made when it is not there")
    parser.add_argument("--title", default="Baton benchmarks", help="head of the page (default: Baton benchmarks)")
    flags = parser.parse(arguments)
    sections = [section_of(load_result(Path(file))) for file in flags.files]
    if not (flags.html or flags.png):
        print("\n\n".join(as_text(section, *section.tables) for section in sections))
    if flags.html:
        print(write_file(Path(flags.html), page_of(flags.title, sections)))
    if flags.png:
        for section in sections:
            for name, picture in section.pictures.items():
                path = Path(flags.png) / f"{section.name}-{name}.png"
                print(write_file(path, as_png(picture.draw()), makes_folder=True))
    return 0
