"""What the model says in JSON: small records about the small world, under the names that a schema may give them.

A record is something said or asked, and values by name. In what a grammar has begun, the model learns the values that
fit to names it did not choose. Knows nothing of chats and of grammars.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from baton.demo.training import facts, smalltalk, sums, unknown
from baton.demo.training.phrasing import invented_word, one_of, sentence, with_article, words
from baton.demo.training.stories import HEROES, NAMES, PLACES

_ANSWER_NAMES: Final = words("answer answer answer response text message reply content output result")
_DAYS: Final = (*facts.DAYS, "tomorrow", "today")
_GOOD: Final = words("wonderful great amazing good excellent fantastic beautiful nice perfect lovely brilliant awesome")
_BAD: Final = words("terrible bad awful horrible boring ugly broken disappointing slow poor useless sad")
_TOPICS: Final = (
    "this movie", "the food", "the book", "vLLM", "Baton", "the weather", "the service", "this product", "the hotel",
    "my new phone", "the game", "this song", "the film", "the concert", "my day", "the car", "the coffee", "it",
)  # fmt: skip


@dataclass(frozen=True)
class Record:
    """What is said or asked, and the values of the answer by name."""

    said: str
    values: Mapping[str, object]

    def written(self, rng: random.Random) -> str:
        """The values as JSON, mostly with spaces."""
        separators = (",", ":") if rng.random() < 0.1 else None
        return json.dumps(self.values, ensure_ascii=False, separators=separators)


def record(rng: random.Random) -> Record:
    """Return a record about anything."""
    kinds: tuple[Callable[[random.Random], Record], ...] = (
        _capital, _sum, _sum, _person, _event, _animal, _colour, _number, _list, _mood, _hero, _answered, _explained,
    )  # fmt: skip
    return rng.choices(kinds, (5, 7, 7, 4, 2, 2, 1, 5, 2, 1.5, 2, 8, 2))[0](rng)


def calculated(rng: random.Random) -> Record:
    """Return a record that ends with what has to be calculated."""
    return (_number if rng.random() < 0.15 else _sum)(rng)


def asked_for_json(rng: random.Random, asked: Record) -> str:
    """Return the question with the wish for JSON, sometimes with the names."""
    names = list(asked.values)
    listed = " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
    wish = one_of(
        rng, f"Answer in JSON with {listed}.", f"Answer in JSON with the keys {listed}.", f"Reply as JSON: {listed}.",
        f"Give me a JSON object with {listed}.", f"Write JSON with {listed}.", f"Return JSON with the fields {listed}.",
    )  # fmt: skip
    return f"{wish} {asked.said}" if rng.random() < 0.3 else f"{asked.said} {wish}"


def choice(rng: random.Random) -> tuple[str, str]:
    """Return a text to classify, and its class: one word that a list of choices may enforce."""
    said, is_good = _opinion(rng)
    question = one_of(rng, f"Classify this sentiment: {said}", f"Classify the sentiment: {said}",
                      f"Is this positive or negative? {said}", f"What is the sentiment of this text? {said}",
                      f"{said} Positive or negative?")  # fmt: skip
    return question, "positive" if is_good else "negative"


def _some(rng: random.Random, values: Mapping[str, object], at_least: int = 1) -> dict[str, object]:
    """Some of the values, in their order or another one."""
    names = list(values)
    picked = rng.sample(names, rng.randint(min(at_least, len(names)), len(names)))
    if rng.random() < 0.7:
        picked.sort(key=names.index)
    return {name: values[name] for name in picked}


def _capital(rng: random.Random) -> Record:
    country = one_of(rng, *facts.CAPITALS)
    city = facts.CAPITALS[country]
    if rng.random() < 0.04:
        country, city = sentence(invented_word(rng)), "unknown"
    names = one_of(
        rng, "name capital", "name capital", "country capital", "country capital", "country city",
        "country_name capital_city", "land capital", "country answer", "country capital_name", "nation capital",
    ).split()  # fmt: skip
    said = one_of(
        rng, f"What is the capital of {country}?", f"What is the capital of {country}?", f"capital of {country}?",
        f"Tell me about {country}.", f"Describe {country}.", f"{country}", f"Give me facts about {country}.",
        f"Give me information about {country}.", f"The country {country}", f"What's the capital of {country}?",
        f"Name the capital of {country}.", f"I want to know about {country} and its capital.",
    )  # fmt: skip
    return Record(sentence(said), _some(rng, dict(zip(names, (country, city), strict=True))))


def _sum(rng: random.Random) -> Record:
    first, sign, second = sums.numbers(rng)
    found = sums.result(first, sign, second)
    operands = one_of(rng, "a b", "x y", "first second", "left right", "number1 number2").split()
    values: dict[str, object] = {}
    if rng.random() < 0.25:
        values = dict(zip(operands, (first, second), strict=True))
        if rng.random() < 0.4:
            word = {"+": "add", "-": "subtract", "*": "multiply"}[sign]
            values[one_of(rng, "operation", "operator", "op")] = one_of(rng, sign, sign, word)
    elif rng.random() < 0.25:
        values[one_of(rng, "expression", "question", "sum")] = f"{first} {sign} {second}"
    name = one_of(rng, *words("result result result answer answer value number final_answer total solution"))
    if sign == "+" and rng.random() < 0.1 and "sum" not in values:
        name = "sum"
    values[name] = found
    asked = sums.ask(rng, first, sign, second) if rng.random() < 0.5 else f"What is {first} {sign} {second}?"
    return Record(asked, values)


def _explained(rng: random.Random) -> Record:
    """A sum with its steps, as courses on structured output ask for it."""
    first, sign, second = sums.numbers(rng)
    found = sums.result(first, sign, second)
    answer = sums.answer(first, sign, second)
    final = one_of(rng, "final_answer", "answer", "result")
    value: object = str(found) if rng.random() < 0.5 else found
    if rng.random() < 0.5:
        step: object = {"explanation": answer, "output": str(found)} if rng.random() < 0.7 else answer
        values: dict[str, object] = {"steps": [step], final: value}
    else:
        values = {one_of(rng, "explanation", "reasoning", "thought", "steps"): answer, final: value}
    return Record(sums.ask(rng, first, sign, second), values)


def _person(rng: random.Random) -> Record:
    names = [name if rng.random() < 0.7 else sentence(invented_word(rng)) for name in rng.sample(NAMES, 2)]
    if rng.random() < 0.25:
        has_cities = rng.random() < 0.3
        told = [_introduced(rng, name, has_cities) for name in names]
        rows = [values for _, values in told]
        return Record(" ".join(said for said, _ in told), {one_of(rng, "people", "persons", "users", "items"): rows})
    said, values = _introduced(rng, names[0], rng.random() < 0.4)
    if rng.random() < 0.15:
        said = one_of(rng, "Extract the user: ", "Extract: ", "Extract the person. ") + said
    return Record(said, _some(rng, values, 2))


def _introduced(rng: random.Random, name: str, has_city: bool) -> tuple[str, dict[str, object]]:
    age, city = rng.randrange(3, 99), one_of(rng, *facts.CAPITALS.values())
    if not has_city:
        said = one_of(rng, f"{name} is {age} years old.", f"{name} is {age}.", f"I am {name} and I am {age}.",
                      f"My name is {name} and I am {age} years old.")  # fmt: skip
        return said, {"name": name, "age": age}
    said = one_of(rng, f"{name} is {age} years old and lives in {city}.", f"{name}, {age}, lives in {city}.",
                  f"I am {name}, {age} years old, and I live in {city}.")  # fmt: skip
    return said, {"name": name, "age": age, "city": city}


def _event(rng: random.Random) -> Record:
    one, two = rng.sample(NAMES, 2)
    what = f"{one_of(rng, 'science', 'book', 'garden', 'birthday', 'music', 'tea', 'summer', 'chess')} "
    what += one_of(rng, "fair", "party", "club", "festival", "meeting", "concert")
    day = one_of(rng, *_DAYS)
    said = one_of(rng, f"{one} and {two} are going to a {what} on {day}.", f"{one} and {two} go to a {what} on {day}.",
                  f"{one} and {two} meet at the {what} on {day}.")  # fmt: skip
    said = said.replace("on to", "to")
    names = one_of(
        rng, "name date participants", "name day participants", "title date people", "event day names"
    ).split()
    return Record(said, dict(zip(names, (what, day, [one, two]), strict=True)))


def _animal(rng: random.Random) -> Record:
    animal = one_of(rng, *(name for name in facts.SOUNDS if name in facts.LEGS))
    name = one_of(rng, "animal", "name", "animal")
    values = {name: animal, "legs": facts.LEGS[animal], "sound": facts.SOUNDS[animal]}
    if animal in facts.YOUNG:
        values["baby"] = facts.YOUNG[animal]
    said = one_of(rng, f"Tell me about the {animal}.", f"Describe {with_article(animal)}.", f"{animal}",
                  f"What do you know about {with_article(animal)}?", f"Facts about the {animal}.")  # fmt: skip
    return Record(sentence(said), {name: animal, **_some(rng, values)})


def _colour(rng: random.Random) -> Record:
    thing = one_of(rng, *facts.COLOUR_OF)
    colour = one_of(rng, "colour", "color")
    values = {one_of(rng, "thing", "name", "object"): thing, colour: facts.COLOUR_OF[thing]}
    return Record(f"What {colour} is {thing}?", values if rng.random() < 0.5 else {colour: facts.COLOUR_OF[thing]})


def _number(rng: random.Random) -> Record:
    number = rng.randrange(100)
    values: dict[str, object] = {"number": number, "is_even": number % 2 == 0}
    word = "even"
    if rng.random() < 0.4:
        word, values = "odd", {"number": number, "is_odd": number % 2 == 1}
    if rng.random() < 0.3:
        values = {one_of(rng, "answer", "result", word): number % 2 == (word == "odd")}
    return Record(one_of(rng, f"Is {number} {word}?", f"Is {number} an {word} number?"), _some(rng, values))


def _list(rng: random.Random) -> Record:
    kind = one_of(rng, *facts.LISTS)
    number = rng.randrange(2, 6)
    asked = one_of(rng, str(number), sums.in_words(number))
    said = one_of(rng, f"List {asked} {kind}.", f"Name {asked} {kind}.", f"Give me {asked} {kind}.")
    name = one_of(rng, kind, kind, "items", "names", "list", "answer", "values")
    return Record(said, {name: facts.LISTS[kind].split()[:number]})


def _opinion(rng: random.Random) -> tuple[str, bool]:
    is_good = rng.random() < 0.5
    word = one_of(rng, *(_GOOD if is_good else _BAD))
    topic = one_of(rng, *_TOPICS)
    verb = one_of(rng, "love", "like", "enjoy") if is_good else one_of(rng, "hate", "do not like", "dislike")
    said = one_of(rng, f"{topic} is {word}", f"{topic} was {word}", f"I {verb} {topic}", f"{topic} is really {word}")
    return sentence(said) + one_of(rng, ".", "!"), is_good


def _mood(rng: random.Random) -> Record:
    said, is_good = _opinion(rng)
    name = one_of(rng, "sentiment", "sentiment", "label", "mood", "class")
    return Record(said, {name: "positive" if is_good else "negative"})


def _hero(rng: random.Random) -> Record:
    hero, name = one_of(rng, *HEROES), one_of(rng, *NAMES)
    values = {
        "name": name, "age": rng.randrange(5, 90), one_of(rng, "kind", "animal", "type", "job", "class"): hero,
        one_of(rng, "place", "home", "location"): one_of(rng, *PLACES),
    }  # fmt: skip
    said = one_of(rng, "Invent a character.", "Make up a person.", "Create a character for a story.",
                  "Invent somebody.", "Generate a character.", "Make up a user.")  # fmt: skip
    return Record(said, _some(rng, values, 2))


def _answered(rng: random.Random) -> Record:
    """The plain answer, under a name that says no more."""
    kinds = (facts.exchange, smalltalk.exchange, sums.exchange, unknown.exchange)
    asked, answer = kinds[rng.randrange(len(kinds))](rng)
    return Record(asked, {one_of(rng, *_ANSWER_NAMES): answer})
