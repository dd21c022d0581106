"""What tools are good for in the texts: clocks, calculators, weather, look-ups.

A skill is some tools and the tasks that they solve: a question, the calls, what the tools say, the answer. Names,
parameters and descriptions vary, so that the model reads them where they are offered. Knows nothing of chats.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from baton.demo.training import facts, unknown
from baton.demo.training.phrasing import invented_word, one_of, sentence, words
from baton.demo.training.stories import NAMES
from baton.demo.training.sums import ask, is_held_out, numbers, result
from baton.demo.training.tools import Call, Task, Tool, Values, described

_CITIES: Final = (
    *facts.CAPITALS.values(), "New York", "San Francisco", "Munich", "Barcelona", "Milan", "Sydney", "Shanghai",
    "Mumbai", "Boston", "Hamburg", "Zurich", "Chicago", "Los Angeles", "Toronto", "Lyon", "Porto", "Krakow", "Berlin",
)  # fmt: skip
_OPERATIONS: Final = {
    "+": ("add add_numbers sum plus addition add_two_numbers sum_numbers", "add", "Add two numbers."),
    "-": ("subtract minus difference subtract_numbers", "subtract", "Subtract the second number from the first."),
    "*": ("multiply times product multiply_numbers multiplication", "multiply", "Multiply two numbers."),
}
_OPERANDS: Final = ("a b", "a b", "a b", "x y", "first second", "left right", "num1 num2", "number1 number2", "n m")
FAILED: Final = "I am sorry, the tool did not work."


@dataclass(frozen=True)
class Skill:
    """Some tools, and what makes tasks for them. `answers`: beginnings of what is said without these tools."""

    tools: tuple[Tool, ...]
    task: Callable[[random.Random], Task]
    answers: tuple[str, ...]


def skills(rng: random.Random) -> list[Skill]:
    """One to three skills, most often one."""
    kinds = (_clock, _clock, _sums, _sums, _calculator, _calculator, _weather, _search, _capitals)
    picked = dict.fromkeys(rng.choice(kinds) for _ in range(rng.choice((1, 1, 1, 2, 2, 3))))
    if _sums in picked and _calculator in picked:
        del picked[_calculator]
    return [kind(rng) for kind in picked]


def _wrapped(rng: random.Random, key: str, value: str | int) -> str:
    """What a tool says: mostly the bare value."""
    if rng.random() < 0.7:
        return str(value)
    return json.dumps({key: value} if rng.random() < 0.8 else {"status": "ok", key: value})


def _is_failing(rng: random.Random) -> str:
    if rng.random() > 0.03:
        return ""
    return one_of(rng, "Error", "error", "Error: timeout", "Error: not found", '{"error": "not found"}',
                  "Error executing tool", "Tool failed: no connection")  # fmt: skip


def _clock(rng: random.Random) -> Skill:
    if rng.random() < 0.15:
        return _calendar(rng)
    name = one_of(
        rng, *words("get_time get_time get_current_time get_current_time current_time clock get_clock now time_now "
                    "tell_time what_time_is_it getTime getCurrentTime get_datetime get_current_datetime time"),
    )  # fmt: skip
    where = one_of(rng, *words("city city location timezone timezone place tz"))
    place = rng.choice(("", "", "", f"{where}?", where))
    tool = Tool(
        name,
        {place: "string"} if place else {},
        described(rng, "Get the current time.", "The current time.", "Returns the current time.", "Tells the time.",
                   "Get the current time in a city.", "Current date and time."),
    )  # fmt: skip
    return Skill((tool,), lambda picked: _time_asked(picked, tool, place), ("I do not know. I have no clock",))


def _time_asked(rng: random.Random, tool: Tool, place: str) -> Task:
    is_zone = place in ("timezone", "tz")
    has_city = bool(place) and (rng.random() < 0.6 or not (is_zone or place.endswith("?")))
    city = one_of(rng, *_CITIES) if has_city else ""
    question = one_of(
        rng, "what time is it", "what time is it", "what is the time", "what's the time", "tell me the time",
        "do you know what time it is", "what time is it now", "what is the current time", "current time",
        "can you tell me the time", "how late is it", "time please", "get the time", "what time do we have",
    ) + (f" in {city}" if city else "")  # fmt: skip
    hour, minute, second = rng.randrange(24), rng.randrange(60), rng.randrange(60)
    date = f"{rng.randrange(2020, 2040)}-{rng.randrange(1, 13):02}-{rng.randrange(1, 29):02}"
    clock = f"{hour:02}:{minute:02}"
    exact = f"{clock}:{second:02}"
    micros = f"{rng.randrange(10**6):06}"
    said = one_of(
        rng, clock, clock, exact, f"{date} {exact}", f"{date}T{exact}", f"{date}T{exact}Z", f"{date}T{exact}+00:00",
        f"{date} {clock}", f"{date}T{exact}.{micros}", f"{date} {exact}.{micros}", f"It is {clock}.",
        f"The time is {clock}.",
    )  # fmt: skip
    if rng.random() < 0.15:
        clock = said = f"{hour % 12 or 12}:{minute:02} {'PM' if hour > 11 else 'AM'}"
    answer = f"It is {clock} in {city}." if city else f"It is {clock}."
    arguments = {place.rstrip("?"): city or "UTC"} if city or is_zone else {}
    return _single(rng, question, Call(tool, arguments, _wrapped(rng, "time", said)), answer, {"time": clock})


def _calendar(rng: random.Random) -> Skill:
    name = one_of(rng, *words("get_date get_current_date current_date today get_today date"))
    tool = Tool(name, {}, described(rng, "Get the current date.", "Today's date.", "Returns the date of today."))

    def task(picked: random.Random) -> Task:
        day = f"{picked.randrange(2020, 2040)}-{picked.randrange(1, 13):02}-{picked.randrange(1, 29):02}"
        said = day if picked.random() < 0.7 else f"{picked.choice(facts.DAYS)}, {day}"
        question = one_of(picked, "what day is it", "what is the date", "what is today's date", "what date is it today",
                          "which day is today", "tell me the date")  # fmt: skip
        return _single(picked, question, Call(tool, {}, _wrapped(picked, "date", said)), f"Today is {said}.",
                       {"date": said})  # fmt: skip

    return Skill((tool,), task, ("I do not know. I have no clock",))


def _single(rng: random.Random, question: str, call: Call, answer: str, found: Values) -> Task:
    """A task of one call. The question gets its punctuation here, and the tool fails now and then."""
    asked = sentence(question) + one_of(rng, "?", "?", "?", "", ".") if question[-1] not in ".?!=" else question
    failure = _is_failing(rng)
    if failure:
        return Task(asked, ((Call(call.tool, call.arguments, failure),),), FAILED, {})
    return Task(asked, ((call,),), answer, found)


def _any_numbers(rng: random.Random) -> tuple[int, str, int]:
    """Numbers of any size. Sums that are held out are never written, whatever their size."""
    if rng.random() < 0.5:
        return numbers(rng)
    while True:
        size = rng.choice((100, 1000, 1000, 10_000, 100_000))
        found = rng.randrange(size), rng.choice("++-**"), rng.randrange(rng.choice((20, 100, 1000, size)))
        if not is_held_out(*found):
            return found


def _ask_sum(rng: random.Random, first: int, sign: str, second: int) -> str:
    if max(first, second) < 100:
        return ask(rng, first, sign, second)
    word = {"+": "plus", "-": "minus", "*": "times"}[sign]
    written = one_of(rng, f"{first}{sign}{second}", f"{first} {sign} {second}", f"{first} {word} {second}")
    verb = {"+": f"add {first} and {second}", "-": f"subtract {second} from {first}",
            "*": f"multiply {first} by {second}"}[sign]  # fmt: skip
    question = one_of(rng, written, f"{written}?", f"what is {written}?", f"what is {written}?", f"{written} =",
                      f"how much is {written}?", f"calculate {written}", f"compute {written}.", f"{verb}.")  # fmt: skip
    return sentence(question)


def _found(rng: random.Random, number: int, written: str) -> str:
    form = rng.random()
    if form < 0.08:
        return f"{written} = {number}"
    if form < 0.14:
        return f"The result is {number}."
    return _wrapped(rng, one_of(rng, "result", "result", "answer", "value"), number)


def _sums(rng: random.Random) -> Skill:
    """A tool for each of some signs."""
    signs = rng.sample("+-*", rng.choice((1, 1, 2, 3)))
    if "+" not in signs and rng.random() < 0.6:
        signs = ["+", *signs]
    names = one_of(rng, *_OPERANDS).split()
    kind = one_of(rng, "integer", "integer", "number")
    tools = {
        sign: Tool(one_of(rng, *_OPERATIONS[sign][0].split()), dict.fromkeys(names, kind),
                   described(rng, _OPERATIONS[sign][2]))
        for sign in signs
    }  # fmt: skip

    def call(first: int, sign: str, second: int, picked: random.Random) -> Call:
        said = _found(picked, result(first, sign, second), f"{first} {sign} {second}")
        return Call(tools[sign], dict(zip(names, (first, second), strict=True)), said)

    def task(picked: random.Random) -> Task:
        if len(tools) > 1 and picked.random() < 0.6:
            return _two_steps(picked, list(tools), call)
        first, sign, second = numbers(picked)
        if sign not in tools and picked.random() < 0.15:  # the model does it by itself
            answer = f"{first} {sign} {second} = {result(first, sign, second)}."
            return Task(ask(picked, first, sign, second), (), answer, {})
        first, sign, second = _any_numbers(picked)
        while sign not in tools:
            first, sign, second = _any_numbers(picked)
        found = result(first, sign, second)
        return _single(picked, _ask_sum(picked, first, sign, second), call(first, sign, second, picked),
                       f"{first} {sign} {second} = {found}.", {"result": found})  # fmt: skip

    return Skill(tuple(tools.values()), task, ())


def _two_steps(rng: random.Random, signs: list[str], call: Callable[[int, str, int, random.Random], Call]) -> Task:
    """The second call needs the result of the first."""
    one, two = rng.sample(signs, 2)
    size = rng.choice((13, 100, 100, 1000))
    first, second, third = rng.randrange(size), rng.randrange(size), rng.randrange(rng.choice((11, 100)))
    between = result(first, one, second)
    found = result(between, two, third)
    if is_held_out(first, one, second) or is_held_out(between, two, third):
        return _two_steps(rng, signs, call)
    word = {"+": "plus", "-": "minus", "*": "times"}
    verb = {"+": f"add {third}", "-": f"subtract {third}", "*": f"multiply by {third}"}[two]
    begin = {"+": f"add {first} and {second}", "-": f"subtract {second} from {first}",
             "*": f"multiply {first} by {second}"}[one]  # fmt: skip
    question = one_of(
        rng, f"What is ({first} {one} {second}) {two} {third}?", f"({first} {one} {second}) {two} {third}",
        f"What is {first} {word[one]} {second}, {word[two]} {third}?",
        f"What is {first} {one} {second}, and then {word[two]} {third}?",
        f"{sentence(begin)}, then {verb}.", f"{sentence(begin)} and {verb}.", f"First {begin}, then {verb}.",
        f"{sentence(begin)}. Then {verb}.",
    )  # fmt: skip
    rounds = ((call(first, one, second, rng),), (call(between, two, third, rng),))
    return Task(question, rounds, f"({first} {one} {second}) {two} {third} = {found}.", {"result": found})


def _calculator(rng: random.Random) -> Skill:
    """One tool for all signs: with an expression, or with an operation and two numbers."""
    name = one_of(rng, *words("calculate calculate calculator calculator calc evaluate compute do_math math eval_math"))
    about = described(rng, "Calculate an expression.", "A calculator.", "Evaluate a mathematical expression.",
                           "Does sums.", "Perform a calculation.")  # fmt: skip
    if rng.random() < 0.65:
        parameter = one_of(rng, *words("expression expression expression expr formula input query"))
        tool = Tool(name, {parameter: "string"}, about)
        return Skill((tool,), lambda picked: _expression(picked, tool, parameter), ())
    in_words = rng.random() < 0.7
    how = one_of(rng, *words("operation operation operator op"))
    signs = {sign: _OPERATIONS[sign][1] if in_words else sign for sign in "+-*"}
    kinds = "|".join([*signs.values(), "divide" if in_words else "/"])
    if in_words and rng.random() < 0.3:
        kinds = "string"
    names = one_of(rng, *_OPERANDS).split()
    order = [(how, kinds), *((name, "number") for name in names)]
    tool = Tool(name, dict(order if rng.random() < 0.6 else [*order[1:], order[0]]), about)

    def task(picked: random.Random) -> Task:
        first, sign, second = _any_numbers(picked)
        given = {how: signs[sign], names[0]: first, names[1]: second}
        found = result(first, sign, second)
        call = Call(
            tool, {key: given[key] for key in tool.parameters}, _found(picked, found, f"{first} {sign} {second}")
        )
        return _single(picked, _ask_sum(picked, first, sign, second), call, f"{first} {sign} {second} = {found}.",
                       {"result": found})  # fmt: skip

    return Skill((tool,), task, ())


def _expression(rng: random.Random, tool: Tool, parameter: str) -> Task:
    first, sign, second = _any_numbers(rng)
    found = result(first, sign, second)
    written = f"{first} {sign} {second}"
    question = _ask_sum(rng, first, sign, second)
    if rng.random() < 0.25:
        other, third = rng.choice("+-*"), rng.randrange(rng.choice((11, 100, 1000)))
        if rng.random() < 0.5:
            written, found = f"({written}) {other} {third}", result(found, other, third)
        elif sign != "*" and other == "*":
            written, found = f"{written} * {third}", result(first, sign, second * third)
        else:
            written, found = f"{written} {other} {third}", result(found, other, third)
        typed = written.replace(" ", "") if rng.random() < 0.4 else written
        question = one_of(rng, f"What is {typed}?", typed, f"calculate {typed}", f"How much is {typed}?")
    call = Call(tool, {parameter: written}, _found(rng, found, written))
    return _single(rng, question, call, f"{written} = {found}.", {"result": found})


def _weather(rng: random.Random) -> Skill:
    name = one_of(rng, *words("get_weather get_weather get_weather get_current_weather weather current_weather "
                              "get_forecast getWeather weather_in"))  # fmt: skip
    where = one_of(rng, *words("city city location location place"))
    units = {one_of(rng, "unit?", "units?"): one_of(rng, "celsius|fahrenheit", "string")} if rng.random() < 0.3 else {}
    tool = Tool(name, {where: "string", **units}, described(
        rng, "Get the weather.", "Get the weather in a city.", "Get current weather for a location.",
        "Get the current weather in a given location."))  # fmt: skip

    def weather(picked: random.Random, city: str) -> tuple[Call, str]:
        degrees, sky = picked.randrange(-15, 40), one_of(picked, *words("sunny cloudy rainy windy snowy foggy clear"))
        bare = one_of(
            picked, sky, f"{sky}, {degrees} degrees", f"{degrees} degrees and {sky}", f"{degrees}°C",
            f"{sentence(sky)}, {degrees}°C", f"{sentence(sky)} and {degrees} degrees", f"{degrees}",
        )  # fmt: skip
        if picked.random() < 0.25:
            said = json.dumps({one_of(picked, "temperature", "temp"): degrees, one_of(picked, "condition", "sky"): sky})
            return Call(tool, {where: city}, said), f"The weather in {city}: {degrees} degrees, {sky}."
        return Call(tool, {where: city}, _wrapped(picked, "weather", bare)), f"The weather in {city}: {bare}."

    def task(picked: random.Random) -> Task:
        one, two = picked.sample(_CITIES, 2)
        call, answer = weather(picked, one)
        if picked.random() < 0.2:
            second, further = weather(picked, two)
            asked = one_of(picked, "What is the weather in", "What's the weather like in", "Weather in")
            question = f"{asked} {one} and {one_of(picked, '', 'in ')}{two}?"
            return Task(question, ((call, second),), f"{answer} {further}", {})
        question = one_of(picked, "what is the weather in", "what's the weather in", "what is the weather like in",
                          "what's the weather like in", "how is the weather in", "weather in", "tell me the weather in",
                          "is it raining in", "is it cold in")  # fmt: skip
        tail = one_of(picked, "", "", "", " today", " right now")
        found = answer.partition(": ")[2].rstrip(".")
        return _single(picked, f"{question} {one}{tail}", call, answer, {"city": one, "weather": found})

    return Skill((tool,), task, ("I do not know. I cannot look",))


def _search(rng: random.Random) -> Skill:
    name = one_of(rng, *words("search web_search search_web lookup wikipedia google find search_docs"))
    parameter = one_of(rng, *words("query query query q text question"))
    tool = Tool(name, {parameter: "string"}, described(rng, "Search the web.", "Look something up.", "Search."))

    def task(picked: random.Random) -> Task:
        question = unknown.question(picked)
        while len(question) > 60:
            question = unknown.question(picked)
        who = f"{one_of(picked, *NAMES)} {sentence(invented_word(picked))}"
        word = invented_word(picked)
        said = one_of(
            picked, f"{who} in {picked.randrange(1500, 2030)}.", f"It was {who}.", f"It is {word}.",
            f"{picked.randrange(10**6)}.", f"{sentence(word)} is near {one_of(picked, *_CITIES)}.",
        )  # fmt: skip
        call = Call(tool, {parameter: question.rstrip("?.")}, said)
        return Task(question, ((call,),), f"I found this: {said}", {"answer": said})

    return Skill((tool,), task, (unknown.ADMISSION, "I do not know the capital"))


def _capitals(rng: random.Random) -> Skill:
    name = one_of(rng, *words("get_capital capital_of get_capital_of find_capital capital lookup_capital"))
    parameter = one_of(rng, *words("country country country name land"))
    tool = Tool(name, {parameter: "string"}, described(rng, "Get the capital of a country.", "The capital city."))

    def task(picked: random.Random) -> Task:
        known = picked.random() < 0.5
        country = one_of(picked, *facts.CAPITALS) if known else sentence(invented_word(picked))
        city = facts.CAPITALS.get(country, sentence(invented_word(picked)))
        call = Call(tool, {parameter: country}, _wrapped(picked, "capital", city))
        asked = one_of(picked, "what is the capital of", "capital of", "which city is the capital of")
        answer = f"The capital of {country} is {city}."
        return _single(picked, f"{asked} {country}", call, answer, {"country": country, "capital": city})

    return Skill((tool,), task, ("The capital of", "I do not know the capital"))
