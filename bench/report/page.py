"""Sections as one HTML page that needs nothing else: no script, no font, no file beside it.

Everything that comes from a file is escaped here and nowhere else; pictures are SVG in data URIs, where they cannot
reach the page.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from html import escape

from bench.plots.style import PALETTE, as_svg
from bench.report.document import Cell, Picture, Section, Table
from bench.report.look import STYLE

HOW_TO_READ = (
    "Ratios have both halves from the same sitting, measured in turns on the same cores: the ratio of the medians, and "
    "the lowest and the highest ratio of any one round. Absolute figures move with the machine and its neighbours; "
    "ratios move less. There is no verdict where the rounds differ more than what is compared.",
    "TTFT: until the first token. TPOT: per request, (E2E - TTFT) / (tokens - 1), which genai-perf calls ITL. "
    "ITL: every gap between tokens, pooled. Failed requests are in no percentile and count as missed in attainment.",
)
"""Paragraphs for the head of every report."""


def page_of(title: str, sections: Sequence[Section]) -> str:
    """The whole page. Figures are drawn here."""
    return "".join(
        (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width,initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body>",
            f"<header><h1>{escape(title)}</h1>",
            *(f'<p class="lead">{escape(text)}</p>' for text in HOW_TO_READ),
            "</header>\n",
            _contents(sections),
            "<main>\n",
            *(part for number, section in enumerate(sections, start=1) for part in _section(number, section)),
            "</main>\n<footer><p>Made by <code>baton bench report</code> from the result files alone.</p></footer>",
            "</body></html>\n",
        )
    )


def _contents(sections: Sequence[Section]) -> str:
    if len(sections) < 2:
        return ""
    lines = (f'<li><a href="#s{n}">{escape(section.name)}</a></li>' for n, section in enumerate(sections, start=1))
    return f"<nav><ul>{''.join(lines)}</ul></nav>\n"


def _section(number: int, section: Section) -> Iterator[str]:
    yield f'<section id="s{number}"><p class="kind">{escape(section.kind)} · {escape(section.name)}</p>'
    yield f"<h2>{escape(section.title)}</h2>"
    facts = section.facts
    commit = facts.commit or "unknown commit"
    yield f'<p class="small">{escape(facts.time)} · {escape(facts.cpu_model)} · commit {escape(commit)}</p>'
    yield f'<code class="command">{escape(facts.command)}</code>\n'
    if section.cards:
        yield f'<div class="cards">{"".join(_cards(section))}</div>\n'
    if section.notes:
        notes = "".join(f"<li>{escape(note)}</li>" for note in section.notes)
        yield f'<div class="notes"><strong>To be known beside the figures</strong><ul>{notes}</ul></div>\n'
    for block in section.blocks:
        yield _picture(block) if isinstance(block, Picture) else _table(block)
    terms = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in section.conditions)
    yield f"<details open><summary>Conditions</summary><dl>{terms}</dl></details></section>\n"


def _cards(section: Section) -> Iterator[str]:
    for card, color in zip(section.cards, PALETTE * len(section.cards), strict=False):
        lines = "".join(f"<li>{escape(line)}</li>" for line in card.lines)
        yield f'<div class="card" style="--mark:{color}"><h4>{escape(card.name)}</h4>'
        yield f"<strong>{escape(card.value)}</strong><p>{escape(card.unit)}</p><ul>{lines}</ul></div>"


def _picture(picture: Picture) -> str:
    data = base64.b64encode(as_svg(picture.draw()).encode()).decode()
    source = f"data:image/svg+xml;base64,{data}"
    return f'<figure><div class="picture"><img alt="{escape(picture.title)}" src="{source}"></div></figure>\n'


def _table(table: Table) -> str:
    is_left = [head in table.words for head in table.heads]
    heads = "".join(
        f"<th{_class(['left'] if left or not place else [])}>{escape(head)}</th>"
        for place, (head, left) in enumerate(zip(table.heads, is_left, strict=True))
    )
    rows = "".join(
        f"<tr>{''.join(_cell(cell, left) for cell, left in zip(row, is_left, strict=True))}</tr>\n"
        for row in table.rows
    )
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    head = f"<thead><tr>{heads}</tr></thead>"
    return f'<h3>{escape(table.title)}</h3><div class="wide"><table>{head}<tbody>{rows}</tbody></table></div>{note}\n'


def _cell(cell: Cell, is_left: bool) -> str:
    detail = f"<small>{escape(cell.detail)}</small>" if cell.detail else ""
    if cell.tone == "head":
        return f'<th scope="row">{escape(cell.text)}{detail}</th>'
    classes = (["left"] if is_left else []) + ([cell.tone] if cell.tone != "plain" else [])
    return f"<td{_class(classes)}>{escape(cell.text)}{detail}</td>"


def _class(names: Sequence[str]) -> str:
    return f' class="{" ".join(names)}"' if names else ""
