"""The text the demo model learns from: an unlimited stream of chats and plain texts about a small world.

Pure Python and a seed: the same seed gives the same texts. A chat is a list of messages as a chat template
takes them; a plain text is what `/v1/completions` continues. Knows nothing of tokens, and never writes a sum
that is held out.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from baton.demo.training import facts, smalltalk, stories, sums, unknown
from baton.demo.training.phrasing import one_of, roughen

Message = dict[str, str]
SYSTEM = (
    "You are a helpful assistant.", "You are a helpful assistant.", "You are a friendly assistant.",
    "You are Baton.", "You are the demo model of Baton.", "Answer briefly.", "Be kind and brief.",
    "You are a helpful AI assistant.", "You are a storyteller.", "Please answer the questions of the user.",
    "You are a chatbot.", "Be concise.", "You are an assistant. Answer in English.",
    "You are a helpful and honest assistant.",
)  # fmt: skip


@dataclass(frozen=True)
class Text:
    """One text: either the messages of a chat, or plain text when there are none."""

    messages: tuple[Message, ...]
    plain: str = ""


def texts(seed: int) -> Iterator[Text]:
    """Yield texts without end, the same ones for the same seed."""
    rng = random.Random(seed)
    while True:
        yield Text((), _plain(rng)) if rng.random() < 0.1 else Text(tuple(chat(rng)))


def refreshers(seed: int) -> Iterator[Text]:
    """Yield chats without end about what the model is weakest at after `texts`, the same ones for the same seed."""
    rng = random.Random(seed)
    kinds = (
        smalltalk.exchange_of_any_topic,
        facts.exchange_of_rarer_kinds,
        sums.exchange_of_rarer_kinds,
        stories.exchange_about_something,
    )
    while True:
        exchanges = [rng.choices(kinds, (3, 4, 2, 1))[0](rng) for _ in range(rng.choice((1, 1, 2)))]
        yield Text(tuple(messages_of(rng, exchanges)))


def chat(rng: random.Random) -> list[Message]:
    """Return the messages of one chat, most of them one to four turns long."""
    messages: list[Message] = []
    if rng.random() < 0.3:
        messages.append({"role": "system", "content": one_of(rng, *SYSTEM)})
    return messages + messages_of(rng, _exchanges(rng))


def messages_of(rng: random.Random, exchanges: list[tuple[str, str]]) -> list[Message]:
    """Return the messages of some questions and answers, the questions as a hurried person may type them."""
    messages: list[Message] = []
    for asked, answered in exchanges:
        messages.append({"role": "user", "content": roughen(rng, asked)})
        messages.append({"role": "assistant", "content": answered})
    return messages


def _exchanges(rng: random.Random) -> list[tuple[str, str]]:
    form = rng.random()
    if form < 0.10:
        return _with_name(rng)
    if form < 0.13:
        return facts.capital_follow_up(rng)
    if form < 0.155:
        return stories.story_with_question(rng)
    if form < 0.165:
        return stories.offered(rng)
    if form < 0.18:
        return [stories.exchange(rng), stories.another(rng)]
    num_turns = rng.choices((1, 2, 3, 4, 8), (50, 20, 15, 12, 3))[0]
    return [_exchange(rng) for _ in range(num_turns)]


def _exchange(rng: random.Random) -> tuple[str, str]:
    kinds = (
        sums.exchange,
        stories.exchange,
        stories.poem,
        facts.exchange,
        smalltalk.exchange,
        unknown.exchange,
    )
    return rng.choices(kinds, (40, 9, 1.5, 22, 16, 13))[0](rng)


def _with_name(rng: random.Random) -> list[tuple[str, str]]:
    if rng.random() < 0.2:
        return [*(_exchange(rng) for _ in range(rng.randrange(2))), smalltalk.name_unknown(rng)]
    introduction, question = smalltalk.names_remembered(rng)
    between = [_exchange(rng) for _ in range(rng.choice((0, 0, 1, 1, 2, 3)))]
    return [introduction, *between, question]


def _plain(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.5:
        return stories.tell(rng, stories.random_story(rng))
    if kind < 0.65:
        country = one_of(rng, *facts.CAPITALS)
        return f"The capital of {country} is {facts.CAPITALS[country]}."
    if kind < 0.75:
        name = one_of(rng, *stories.NAMES)
        return f"Hello, my name is {name}, and I live {one_of(rng, *stories.PLACES)}. {_introduction(rng)}"
    if kind < 0.8:
        return one_of(rng, smalltalk.ABOUT_BATON, smalltalk.ABILITIES, smalltalk.ABOUT_ME)
    if kind < 0.9:
        return facts.exchange(rng)[1]
    return sums.exchange(rng)[1]


def _introduction(rng: random.Random) -> str:
    thing = one_of(rng, *stories.THINGS)
    return one_of(rng,
                  f"I have a {one_of(rng, 'small', 'blue', 'red')} {thing} and a good friend named "
                  f"{one_of(rng, *stories.NAMES)}.",
                  f"My best friend is a {one_of(rng, 'fox', 'robot', 'bear', 'cat')} named "
                  f"{one_of(rng, *stories.NAMES)}.")  # fmt: skip
