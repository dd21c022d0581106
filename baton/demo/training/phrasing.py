"""How people type: turns a clean question into one of the many ways it arrives in practice.

Owns manners ("please", "hey"), careless typing (lower case, no punctuation, typos) and nothing else. It never
changes a digit, so that the answer to a roughened sum stays right.
"""

from __future__ import annotations

import random

_OPENERS = (
    "hey, ",
    "hi, ",
    "hello, ",
    "ok, ",
    "so, ",
    "well, ",
    "quick question: ",
    "tell me, ",
    "now ",
    "and ",
)
_CLOSERS = (" please", ", please", " thanks", " pls", " for me", " now", ", thank you")
_ASKING = (
    "can you ",
    "could you ",
    "please ",
    "can you please ",
    "would you ",
    "could you please ",
    "i want you to ",
)
_NEIGHBOURS = {
    "a": "s", "e": "r", "i": "o", "o": "p", "t": "r", "n": "m", "s": "a", "r": "t", "l": "k", "u": "i",
    "h": "g",
}  # fmt: skip


def words(row: str) -> list[str]:
    """Split a row of words, the short way to write a table of them."""
    return row.split()


def one_of(rng: random.Random, *options: str) -> str:
    """Pick one of the given phrasings, each as likely as the others."""
    return options[rng.randrange(len(options))]


def request(rng: random.Random, command: str) -> str:
    """Turn a command ("tell me a story") into a bare or a polite request for it."""
    if rng.random() < 0.35:
        asking = one_of(rng, *_ASKING)
        ending = "?" if asking.startswith(("can", "could", "would")) else "."
        return sentence(asking + command + ending)
    return sentence(command) + one_of(rng, "", ".", ".", "!")


def sentence(text: str) -> str:
    """Return the text with its first letter in upper case."""
    return text[:1].upper() + text[1:]


def with_article(noun: str) -> str:
    """Return the noun with "a" or "an" before it."""
    return ("an " if noun[0] in "aeiou" else "a ") + noun


_SYLLABLES = words(
    "ba ke lo mi tra gon sel vi dur pa zen quo rif ta mol ex um bra ni ost ur kal fe wy den po lis gra tu "
    "nor sha vex li "
    "cro an ter pi do ble ment ing tion al ph th ck str sk ou ee"
)


def invented_word(rng: random.Random) -> str:
    """Return a word that means nothing, sometimes only letters."""
    if rng.random() < 0.2:
        return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randrange(3, 9)))
    word = "".join(rng.choice(_SYLLABLES) for _ in range(rng.randrange(2, 5)))
    return sentence(word) if rng.random() < 0.3 else word


def roughen(rng: random.Random, text: str) -> str:
    """Return the text as a hurried person may type it: often unchanged, or lower case, bare, misspelt."""
    if rng.random() < 0.06:
        text = one_of(rng, *_OPENERS) + text[:1].lower() + text[1:]
    if rng.random() < 0.06:
        text = text.rstrip(".!?") + one_of(rng, *_CLOSERS) + text[len(text.rstrip(".!?")) :]
    if rng.random() < 0.35:
        text = text.lower()
    elif rng.random() < 0.03:
        text = text.upper()
    if rng.random() < 0.30:
        text = text.rstrip(".!?")
    if rng.random() < 0.10:
        text = text.replace("'", "").replace(",", "")
    if rng.random() < 0.08:
        text = _mistype(rng, text)
    if rng.random() < 0.03:
        text += one_of(rng, " ", "\n", "  ")
    return text


def _mistype(rng: random.Random, text: str) -> str:
    position = rng.randrange(max(1, len(text) - 1))
    letter, rest = text[position], text[position + 1 :]
    if not letter.isalpha():
        return text
    kind = rng.randrange(4)
    if kind == 0:
        return text[:position] + rest
    if kind == 1:
        return text[:position] + letter + letter + rest
    if kind == 2 and rest[:1].isalpha():
        return text[:position] + rest[0] + letter + rest[1:]
    return text[:position] + _NEIGHBOURS.get(letter, letter) + rest
