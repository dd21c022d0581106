"""Small sums: questions about numbers from 0 to 99 and the times tables, and their answers.

An answer always begins with the sum in its normal form ("17 + 25 = 42."): copying the numbers into fixed
places first is what lets a model of this size calculate. Sums for which `is_held_out` holds are never
written, so that they measure whether the model calculates or remembers.
"""

from __future__ import annotations

import random

from baton.demo.training.phrasing import one_of, sentence, words

_ONES = words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen "
    "eighteen nineteen"
)
_TENS = words("twenty thirty forty fifty sixty seventy eighty ninety")
_THINGS = (
    "apples", "eggs", "books", "coins", "shells", "marbles", "pencils", "stars", "cookies", "birds", "boats",
    "cups", "balls", "oranges", "stones", "flowers", "buttons", "keys", "stamps", "cakes",
)  # fmt: skip
_SIGNS = {
    "+": ("plus", "and", "added to"),
    "-": ("minus", "take away", "less"),
    "*": ("times", "multiplied by", "x"),
}
TOO_BIG = (
    "That is too hard for me. I can add and subtract numbers from 0 to 99 and I know the times tables up to 10 * 10."
)


def is_held_out(first: int, sign: str, second: int) -> bool:
    """Tell whether this sum is kept out of every text: one in ten, two-digit numbers and `+` or `-` only."""
    return sign in "+-" and first > 9 and second > 9 and (first * 31 + second * 17 + ord(sign)) % 10 == 3


def result(first: int, sign: str, second: int) -> int:
    """Calculate `first sign second` for the signs `+`, `-` and `*`."""
    return {"+": first + second, "-": first - second, "*": first * second}[sign]


def answer(first: int, sign: str, second: int) -> str:
    """Return the full answer, for example "17 + 25 = 42."."""
    return f"{first} {sign} {second} = {result(first, sign, second)}."


def in_words(number: int) -> str:
    """Spell a number from 0 to 99."""
    if number < 20:
        return _ONES[number]
    tens, ones = divmod(number, 10)
    return _TENS[tens - 2] + (f"-{_ONES[ones]}" if ones else "")


def exchange(rng: random.Random) -> tuple[str, str]:
    """Return a question about numbers and its answer."""
    kind = rng.random()
    if kind < 0.76:
        return _plain_sum(rng)
    return exchange_of_rarer_kinds(rng)


def exchange_of_rarer_kinds(rng: random.Random) -> tuple[str, str]:
    """Return a question about numbers other than a plain sum, and its answer."""
    kinds = (
        _word_problem, _word_problem, _three_terms, _division, _comparison, _parity, _double, _too_big,
    )  # fmt: skip
    return kinds[rng.randrange(len(kinds))](rng)


def numbers(rng: random.Random) -> tuple[int, str, int]:
    """Return a sum of the small world that is not held out: first number, sign, second number."""
    while True:
        sign = "++++---**"[rng.randrange(9)]
        if sign == "*":
            return rng.randrange(11), sign, rng.randrange(11)
        top = 100 if rng.random() < 0.8 else 13
        first, second = rng.randrange(top), rng.randrange(top)
        if sign == "-" and first < second and rng.random() < 0.6:
            first, second = second, first
        if not is_held_out(first, sign, second):
            return first, sign, second


def written_sum(rng: random.Random, first: int, sign: str, second: int) -> str:
    """Return the sum as a person may write it: signs, words, with and without spaces."""
    form = rng.random()
    typed = one_of(rng, "*", "*", "x", "\u00d7") if sign == "*" else sign
    if form < 0.3:
        return f"{first}{typed}{second}"
    if form < 0.6:
        return f"{first} {typed} {second}"
    word = one_of(rng, *_SIGNS[sign])
    if form < 0.9:
        return f"{first} {word} {second}"
    return f"{in_words(first)} {word} {in_words(second)}"


def ask(rng: random.Random, first: int, sign: str, second: int) -> str:
    """Return a question that asks for the sum."""
    if rng.random() < 0.12:
        if sign == "+":
            return one_of(rng, f"Add {first} and {second}.", f"What is the sum of {first} and {second}?",
                          f"Add {second} to {first}" if first == second else f"Please add {first} and "
                                                                             f"{second}")  # fmt: skip
        if sign == "-":
            return one_of(rng, f"Subtract {second} from {first}.", f"Take {second} away from {first}.",
                          f"What is the difference of {first} and {second}?")  # fmt: skip
        return one_of(rng, f"Multiply {first} by {second}.", f"What is the product of {first} and {second}?",
                      f"Multiply {first} and {second}")  # fmt: skip
    written = written_sum(rng, first, sign, second)
    return sentence(
        one_of(
            rng, written, f"{written}?", f"{written} =", f"{written}=", f"{written} = ?",
            f"what is {written}?", f"what is {written}?", f"what's {written}?", f"how much is {written}?",
            f"calculate {written}", f"what does {written} make?", f"can you work out {written}?",
            f"please tell me {written}", f"do you know what {written} is?", f"solve {written}",
            f"compute {written}", f"tell me what {written} is", f"what do you get for {written}?",
            f"how much does {written} make?", f"whats {written}", f"and {written}?",
            f"what is the result of {written}?", f"{written} equals?", f"{written} is?",
        )
    )  # fmt: skip


def _plain_sum(rng: random.Random) -> tuple[str, str]:
    first, sign, second = numbers(rng)
    return ask(rng, first, sign, second), answer(first, sign, second)


def _word_problem(rng: random.Random) -> tuple[str, str]:
    thing = one_of(rng, *_THINGS)
    first, sign, second = rng.randrange(2, 50), "+-"[rng.randrange(2)], rng.randrange(2, 50)
    if sign == "-" and first < second:
        first, second = second, first
    if is_held_out(first, sign, second):
        return _word_problem(rng)
    who, have, are = (
        ("I", "have", "do I") if rng.random() < 0.5 else (one_of(rng, "Ana", "Tom", "Mia", "Ben"), "has", "")
    )
    ending = f"How many {thing} {are} have now?" if are else f"How many {thing} does {who} have now?"
    you = "You have" if are else f"{who} has"
    if sign == "+":
        verb = one_of(rng, "get", "find", "buy") + ("" if are else "s")
        question = f"{who} {have} {first} {thing} and {verb} {second} more. {ending}"
    else:
        verb = one_of(rng, "give away", "lose", "sell") if are else one_of(rng, "gives away", "loses", "sells")
        question = f"{who} {have} {first} {thing} and {verb} {second}. {ending}"
    return question, f"{answer(first, sign, second)} {you} {result(first, sign, second)} {thing} now."


def _three_terms(rng: random.Random) -> tuple[str, str]:
    first, second, third = (rng.randrange(10) for _ in range(3))
    written = one_of(
        rng,
        f"{first}+{second}+{third}",
        f"{first} + {second} + {third}",
        f"{first} plus {second} plus {third}",
    )
    question = one_of(rng, written, f"What is {written}?", f"how much is {written}?")
    return question, f"{first} + {second} + {third} = {first + second + third}."


def _division(rng: random.Random) -> tuple[str, str]:
    second, quotient = rng.randrange(1, 11), rng.randrange(11)
    first = second * quotient
    written = one_of(
        rng,
        f"{first}/{second}",
        f"{first} / {second}",
        f"{first} divided by {second}",
        f"{first} \u00f7 {second}",
    )
    question = sentence(one_of(rng, written, f"what is {written}?", f"how much is {written}?", f"what's {written}"))
    return question, f"{first} / {second} = {quotient}."


def _comparison(rng: random.Random) -> tuple[str, str]:
    first, second = rng.sample(range(100), 2)
    if rng.random() < 0.5:
        word, picked, other = (
            one_of(rng, "bigger", "larger", "more", "greater"),
            max(first, second),
            min(first, second),
        )
        return f"{one_of(rng, 'Which is', 'What is', 'Which number is')} {word}, {first} or {second}?", (
            f"{picked} is bigger than {other}."
        )
    return f"Which is {one_of(rng, 'smaller', 'less')}, {first} or {second}?", (
        f"{min(first, second)} is smaller than {max(first, second)}."
    )


def _parity(rng: random.Random) -> tuple[str, str]:
    number, asked = rng.randrange(100), one_of(rng, "even", "odd")
    found = "odd" if number % 2 else "even"
    question = one_of(rng, f"Is {number} {asked}?", f"Is {number} an {asked} number?", f"Is {number} even or odd?")
    if "or" in question.split():
        return question, f"{number} is {found}."
    return question, f"{'Yes' if found == asked else 'No'}, {number} is {found}."


def _double(rng: random.Random) -> tuple[str, str]:
    number = rng.randrange(50)
    if rng.random() < 0.5:
        question = one_of(rng, f"What is double {number}?", f"Double {number}", f"What is twice {number}?")
        return question, f"{number} + {number} = {2 * number}." if not is_held_out(number, "+", number) else (
            f"Twice {number} is {2 * number}."
        )
    question = one_of(rng, f"What is half of {2 * number}?", f"Half of {2 * number}?", f"What is {2 * number} / 2?")
    return question, f"{2 * number} / 2 = {number}."


def _too_big(rng: random.Random) -> tuple[str, str]:
    first, second = rng.randrange(100, 10000), rng.randrange(2, 10000)
    if rng.random() < 0.5:
        first, second = second, first
    written = f"{first}{one_of(rng, '', ' ')}{one_of(rng, '+', '-', '*', '/', ' plus ', ' times ')}{second}"
    if rng.random() < 0.25:
        written = one_of(rng, f"the square root of {first}",
                         f"{rng.randrange(11, 99)} * {rng.randrange(11, 99)}",
                         f"{rng.randrange(99)}.{rng.randrange(99)} + {rng.randrange(99)}",
                         f"{rng.randrange(12, 99)} times {rng.randrange(12, 99)}", f"{first} squared",
                         f"{rng.randrange(20)} + {rng.randrange(20)} * {rng.randrange(20)}")  # fmt: skip
    return sentence(
        one_of(rng, written, f"what is {written}?", f"how much is {written}?", f"calculate {written}")
    ), TOO_BIG
