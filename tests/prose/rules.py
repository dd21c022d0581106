"""Sentences of a Markdown page, and what is wrong with them.

Owns what counts as prose: code, tables, comments, the targets of links and what a program writes between two marks do
not; code within a sentence is one word.
A heading is prose, but no sentence. Does not know which pages there are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

MAX_WORDS_OF_A_SENTENCE = 25
_NUMBER = r"\d[\d.,]*(?:\s?%)?"
_RATIO = re.compile(rf"{_NUMBER}(?: \w+)? (?:to|against|instead of|versus|vs\.?) {_NUMBER}")
_FREE_RELATIVE = re.compile(r"\W*(?:who|what)(?:ever)?\b", re.IGNORECASE)
_NO_PROSE = re.compile(
    r"<!-- (\w+): begin -->.*?<!-- \1: end -->|<!--.*?-->|^```.*?^```[^\n]*$|^( *)~~~.*?^\2~~~[^\n]*$",
    re.DOTALL | re.MULTILINE,
)
_ITEM = re.compile(r"^\s*(?:[-*+]|\d+[.)]) ")
_SENTENCE_END = re.compile(r"(?<!\be\.g\.)(?<!\bi\.e\.)(?<=[.!?])[)\"'*_]*\s+|(?<=[.!?][)\"'*_])\s+")


class Block(NamedTuple):
    """A paragraph, an item of a list or a heading: plain words."""

    line: int
    text: str
    is_heading: bool


class Fault(NamedTuple):
    """What is wrong with a sentence that begins in a block at `line`."""

    line: int
    what: str
    sentence: str


def blocks(page: str) -> Iterator[Block]:
    """The prose of a page, in order."""
    page = _NO_PROSE.sub(lambda found: "\n" * found[0].count("\n"), page)
    taken: list[str] = []
    start, is_in_list = 1, False
    for number, line in enumerate([*page.splitlines(), ""], 1):
        is_item, is_heading = bool(_ITEM.match(line)), line.startswith("#")
        is_code = not taken and line.startswith(" " * (8 if is_in_list else 4)) and not is_item
        if taken and (not line.strip() or is_item or is_heading or line.startswith("|")):
            yield Block(start, plain(" ".join(taken)), is_heading=False)
            taken = []
        if is_heading:
            yield Block(number, plain(line), is_heading=True)
        elif line.strip() and not line.startswith("|") and not is_code:
            start = start if taken else number
            taken.append(_ITEM.sub("", line, count=1).strip(" >"))
        is_in_list = is_item or (is_in_list and line[:1] in ("", " "))


def plain(text: str) -> str:
    """`text` without marks of Markdown."""
    text = re.sub(r"`+[^`]+`+", "Code", text)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)|<[^>]+>", "", text)
    text = re.sub(r"\[([^\]]*)\](?:\([^)]*\)|\[[^\]]*\])", r"\1", text)
    return text.replace("*", "").lstrip("# ")


def sentences(block: Block) -> list[str]:
    """Those of a block; () of a heading."""
    return [] if block.is_heading else [each for each in _SENTENCE_END.split(block.text) if each.strip()]


def num_words(text: str) -> int:
    """What has a letter or a digit, with blanks around it."""
    return sum(any(map(str.isalnum, word)) for word in text.split())


def faults(page: str) -> list[Fault]:
    """What is wrong with a page."""
    return [
        Fault(block.line, what, sentence)
        for block in blocks(page)
        for sentence in sentences(block)
        for what in faults_of(sentence)
    ]


def faults_of(sentence: str) -> Iterator[str]:
    """What is wrong with a sentence."""
    if (words := num_words(sentence)) > MAX_WORDS_OF_A_SENTENCE:
        yield f"{words} words, {MAX_WORDS_OF_A_SENTENCE} at most"
    if _FREE_RELATIVE.match(sentence) and not sentence.rstrip(" \"')").endswith("?"):
        yield "begins with who or what"
    if len(_RATIO.findall(sentence)) > 1:
        yield "a chain of ratios"
