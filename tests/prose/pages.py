"""Which pages the rules of prose are for, and how many words the site may have.

Research is for those who look for it: it follows no rule and counts no words.
"""

from __future__ import annotations

from pathlib import Path

from tests.prose.rules import blocks, num_words

ROOT = Path(__file__).parents[2]
MAX_WORDS_OF_THE_SITE = 50_000


def pages() -> dict[str, str]:
    """Text of README.md and of each page of the site, by path."""
    roots = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    paths = [*roots, *sorted((ROOT / "docs").rglob("*.md"))]
    names = [path.relative_to(ROOT).as_posix() for path in paths]
    return {name: (ROOT / name).read_text() for name in names if not name.startswith("docs/research/")}


def words_of_site(all_pages: dict[str, str]) -> dict[str, int]:
    """Words of prose of each page of the site, which the three at the root are not counted in."""
    return {
        name: sum(num_words(block.text) for block in blocks(text))
        for name, text in all_pages.items()
        if name.startswith("docs/")
    }
