"""README.md and the pages of the site are plain English, and not more of it than anyone reads."""

from __future__ import annotations

import pytest

from tests.prose.pages import MAX_WORDS_OF_THE_SITE, pages, words_of_site
from tests.prose.rules import blocks as blocks_of
from tests.prose.rules import faults, sentences

PAGES = pages()
WORDS_25 = "one " * 24 + "end."


@pytest.mark.parametrize("name", sorted(PAGES))
def test_a_page_is_plain_english(name: str) -> None:
    assert [f"{name}:{fault.line}: {fault.what}: {fault.sentence}" for fault in faults(PAGES[name])] == []


def test_the_site_can_be_read() -> None:
    assert sum(words_of_site(PAGES).values()) <= MAX_WORDS_OF_THE_SITE


@pytest.mark.parametrize(
    ("sentence", "what"),
    [
        ("one " * 26 + "end.", "27 words, 25 at most"),
        ("The node sends it: " + WORDS_25, "29 words, 25 at most"),
        ("Short. - " + "word " * 26, "26 words, 25 at most"),
        ("Whoever asks waits.", "begins with who or what"),
        ("It runs. *What it sends* is small.", "begins with who or what"),
        ("It takes 0.24 to 0.72 of the time and 0.49 to 0.79 of the memory.", "a chain of ratios"),
        ("It takes 11 ms against 12 ms, and 3 instead of 4.", "a chain of ratios"),
    ],
)
def test_a_fault_is_found(sentence: str, what: str) -> None:
    assert [fault.what for fault in faults(f"# Title\n\nText.\n\n{sentence}\n")] == [what]


@pytest.mark.parametrize(
    "text",
    [
        WORDS_25,
        "What does it cost?",
        "Whole blocks travel.",
        f"{WORDS_25} {WORDS_25}",
        f"- {WORDS_25}\n- {WORDS_25}\n  1. {WORDS_25}\n",
        f"{WORDS_25[:-1]}\n| {WORDS_25} |\n",
        "## What a page has and what it has not and what " + "more " * 30,
        f"```\n{WORDS_25} {WORDS_25} no end\n```\n",
        f"    {WORDS_25[:-1]} {WORDS_25}\n",
        f"Run `{WORDS_25[:-1]} {WORDS_25}` now.",
        f"See [the page](a/very/long/path.md#{'-'.join(WORDS_25.split())}).",
        "<!-- " + "comment " * 30 + "-->",
        f"<!-- rows: begin -->\n{WORDS_25[:-1]} {WORDS_25}\n<!-- rows: end -->",
        "It took 0.24 to 0.72 of the time.",
    ],
)
def test_no_fault_is_invented(text: str) -> None:
    assert faults(f"# Title\n\nText.\n\n{text}\n") == []


def test_code_in_a_sentence_is_a_word_and_the_line_is_where_a_block_begins() -> None:
    found = list(blocks_of("# Title\n\nGive `--a b` to\n`c d`. Then **end** [it](x.md).\n\n- an item\n  goes on\n"))
    assert [(block.line, block.text) for block in found] == [
        (1, "Title"),
        (3, "Give Code to Code. Then end it."),
        (6, "an item goes on"),
    ]
    assert sentences(found[1]) == ["Give Code to Code.", "Then end it."]
