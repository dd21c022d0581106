"""Requests whose answers copy much of their prompts, and requests whose answers copy nothing.

Owns their texts. Knows no server and no method. A kind has another text for every number, and the same one each time.
"""

from __future__ import annotations

import colorsys
import html
import inspect
import random
import shlex
import shutil
import string
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass

_FUNCTIONS: tuple[Callable[..., object], ...] = (
    colorsys.rgb_to_hsv, textwrap.indent, colorsys.hls_to_rgb, html.escape, colorsys.rgb_to_hls, string.capwords,
    colorsys.hsv_to_rgb, shutil.copyfileobj, colorsys.rgb_to_yiq, shlex.quote,
)  # fmt: skip
_FIRST = ("Anna", "Tom", "Mira", "Ivan", "Lena", "Omar", "Ruth", "Paul", "Ines", "Karl")
_LAST = ("Berg", "Hale", "Sato", "Petrov", "Fuchs", "Nasser", "Lind", "Moreau", "Costa", "Weber")
_JOBS = ("nurse", "baker", "pilot", "teacher", "judge", "tailor", "farmer", "chemist")
_TOWNS = ("Varenholm", "Brinstad", "Keldby", "Ostermark", "Fjellvik", "Morrowby", "Halden Bay", "Sankt Erik")
_PLACES = ("lighthouse", "mill", "bridge", "library", "clock tower", "harbour", "theatre", "railway station")
_THINGS = ("whale oil", "charcoal", "grain", "old letters", "copper", "salted fish", "timber", "wool")
_TOPICS = (
    "walking in the mountains", "learning a language", "keeping a garden", "playing chess", "cooking for friends",
    "reading old novels", "repairing bicycles", "watching birds", "singing in a choir", "travelling by train",
    "baking bread", "collecting stamps", "swimming in cold lakes", "drawing from life", "looking at the stars",
    "building model ships",
)  # fmt: skip
_ASKED = ("Why do people enjoy {}?", "What should a beginner know about {}?", "How has {} changed over a century?")


@dataclass(frozen=True, slots=True)
class Task:
    """`copied`: the text that a client knows and that the answer repeats, with changes perhaps; "" if there is none."""

    kind: str
    question: str
    copied: str = ""


def _edit(number: int) -> Task:
    function = _FUNCTIONS[number % len(_FUNCTIONS)]
    code, name = inspect.getsource(function), next(iter(inspect.signature(function).parameters))
    asked = (
        f"Here is a Python function:\n\n```python\n{code}```\n\nRewrite the whole function with `{name}` renamed to "
    )
    return Task("edit code", f"{asked}`{name}_{number}`.", code)


def _quote(number: int) -> Task:
    chance = random.Random(number)
    person, town, place, thing, other = (chance.choice(each) for each in (_FIRST, _TOWNS, _PLACES, _THINGS, _THINGS))
    year = chance.randrange(1500, 1900)
    text = (
        f"The {place} of {town} was built in {year} by {chance.randrange(12, 90)} masons from the north. It held "
        f"{thing} until {year + chance.randrange(20, 90)}, when its keeper, {person} {chance.choice(_LAST)}, had it "
        f"cleared for {other}. A diary names every ship, cart and guest that came, and the diary is now in the museum "
        f"of {chance.choice(_TOWNS)}. In winter nobody can reach the {place} except by boat."
    )
    return Task("quote", f"Repeat the following passage word for word:\n\n{text}", text)


def _table(number: int) -> Task:
    chance = random.Random(number)
    towns = chance.sample(_TOWNS, 6)
    rows = [
        f"| {town} | {chance.randrange(1000, 99000):,} | {chance.randrange(1200, 1900)} | {chance.choice(_THINGS)} |"
        for town in towns
    ]
    text = "\n".join(("| town | people | founded | trade |", "|---|---|---|---|", *rows))
    return Task("repeat a table", f"Repeat this table exactly:\n\n{text}", text)


def _json(number: int) -> Task:
    chance = random.Random(number)
    people = [
        (f"{first} {chance.choice(_LAST)}", chance.randrange(18, 80), chance.choice(_JOBS), chance.choice(_TOWNS))
        for first in chance.sample(_FIRST, 5)
    ]
    lines = "\n".join(f"{name}, {age}, {job}, {town}" for name, age, job, town in people)
    name, age, job, town = people[0]
    example = f'{{"name": "{name}", "age": {age}, "job": "{job}", "town": "{town}"}}'
    asked = f"Here is a list of people:\n\n{lines}\n\nWrite them as a JSON list. Each item looks like this:\n{example}"
    return Task("JSON by an example", asked)


def _chat(number: int) -> Task:
    asked = _ASKED[number // len(_TOPICS) % len(_ASKED)].format(_TOPICS[number % len(_TOPICS)])
    return Task("chat", f"{asked} Answer in a few sentences.")


COPYING: Mapping[str, Callable[[int], Task]] = {
    "edit code": _edit, "quote": _quote, "repeat a table": _table, "JSON by an example": _json,
}  # fmt: skip
PROSE: Mapping[str, Callable[[int], Task]] = {"chat": _chat}
KINDS: Mapping[str, Callable[[int], Task]] = {**COPYING, **PROSE}


def mixture(number: int, num_tasks: int) -> list[Task]:
    """Copying and prose in turns."""
    copying = list(COPYING.values())
    return [
        copying[index // 2 % len(copying)](number + index) if index % 2 == 0 else _chat(number + index)
        for index in range(num_tasks)
    ]
