"""What the model thinks before an answer: the columns of a sum, or one line on what it is going to do.

Thinking lets it add and subtract numbers that are too long for it otherwise. Knows nothing of chats.
"""

from __future__ import annotations

import random
import re
from typing import Final

from baton.demo.training import sums, unknown
from baton.demo.training.phrasing import one_of, sentence

_SUM: Final = re.compile(r"(\d+) ([+*-]) (\d+) = ")
_CAPITAL: Final = re.compile(r"The capital of (.+) is (.+)\.")


def long_sum(rng: random.Random) -> tuple[str, str]:
    """Return a question for a sum of numbers up to 999, not held out, and its answer."""
    while True:
        first, sign, second = rng.randrange(1000), rng.choice("++-"), rng.randrange(rng.choice((100, 1000, 1000)))
        if sign == "-" and first < second and rng.random() < 0.8:
            first, second = second, first
        if not sums.is_held_out(first, sign, second):
            break
    word = {"+": "plus", "-": "minus"}[sign]
    written = one_of(rng, f"{first}{sign}{second}", f"{first} {sign} {second}", f"{first} {word} {second}")
    question = one_of(rng, written, f"what is {written}?", f"what is {written}?", f"how much is {written}?",
                      f"calculate {written}", f"{written} =", f"what's {written}?")  # fmt: skip
    return sentence(question), sums.answer(first, sign, second)


def thought(answer: str) -> str:
    """Return what is thought before this answer is given."""
    if found := _SUM.match(answer):
        return working(int(found[1]), found[2], int(found[3]))
    if found := _CAPITAL.match(answer):
        return f"They ask for a capital. The one of {found[1]} is {found[2]}."
    if answer.startswith((unknown.ADMISSION, "I do not know")):
        return "I do not know this, so I say that."
    if answer.startswith("Once"):
        return "They want a story. I make one up, with a good end."
    if answer == sums.TOO_BIG:
        return "This is too hard for me, so I say that."
    return "I can answer this at once."


def working(first: int, sign: str, second: int) -> str:
    """Return how the sum is worked out, column by column from the right."""
    if sign == "*":
        return f"{first} * {second} is in the times tables. So {first * second}."
    if sign == "-" and first < second:
        return f"{second} is more than {first}. {_columns(second, sign, first)} So {first - second}."
    return f"{_columns(first, sign, second)} So {sums.result(first, sign, second)}."


def _columns(first: int, sign: str, second: int) -> str:
    written = []
    width = len(str(max(first, second)))
    carried = 0
    for one, two in zip(f"{first:0{width}}"[::-1], f"{second:0{width}}"[::-1], strict=True):
        column = f"{one} {sign} {two}" + (f" {sign} {carried}" if carried else "")
        found = int(one) + int(two) + carried if sign == "+" else int(one) - int(two) - carried
        carried = found // 10 if sign == "+" else int(found < 0)
        written.append(f"{column} = {found}" + (f", {found % 10} and {carried}." if carried else "."))
    return " ".join(written)
