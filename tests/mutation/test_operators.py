"""What is changed in a source, and what is left alone."""

from __future__ import annotations

import pytest

from tests.mutation.operators import mutants_of


def changed(source: str) -> set[str]:
    """The lines that mutants of a source have instead of its own."""
    return {mutant.lines_of(source.encode())[1] for mutant in mutants_of(source.encode())}


def in_function(statement: str) -> set[str]:
    return changed(f"def f():\n    {statement}\n")


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("x = a < b", {"x = (a >= b)", "x = (a <= b)"}),
        ("x = a is None", {"x = (a is not None)"}),
        ("x = a < b == c", {"x = (a >= b == c)", "x = (a <= b == c)", "x = (a < b != c)"}),
        ("x = a + b", {"x = (a - b)"}),
        ("x = a and b", {"x = (a or b)", "x = (a)", "x = (b)"}),
        ("x = not a", {"x = (a)"}),
        ("x = b if a else c", {"x = b if (not (a)) else c"}),
        ("x = [a for a in b if a.c]", {"x = [a for a in b if (not (a.c))]"}),
        ("x = 3", {"x = 4", "x = (2)"}),
        ("x = 0.5", {"x = 1.0"}),
        ("x = True", {"x = False"}),
        ("x = a[b:c]", {"x = a[:c]", "x = a[b:]"}),
        ("x = min(a, b)", {"x = max(a, b)"}),
        ("x = f(a, b)", {"x = (f(b, a))"}),
        ("x += a", {"x -= a", "pass"}),
        ("x.y = a", {"pass"}),
        ("x.y()", {"pass"}),
        ("await x", {"pass"}),
        ("del x[a]", {"pass"}),
        ("return x", {"return None"}),
        ("return", {"pass"}),
    ],
)
def test_a_statement_has_these_mutants(statement: str, expected: set[str]) -> None:
    kind = "async def" if "await" in statement else "def"
    assert changed(f"{kind} f():\n    {statement}\n") == expected


def test_loops_are_left_and_gone_on_with() -> None:
    source = "def f():\n    for x in y:\n        if x:\n            break\n        continue\n"
    assert changed(source) == {"if (not (x)):", "continue", "break"}


@pytest.mark.parametrize(
    "source",
    [
        '"""A docstring of 3 words."""',
        "import a",
        "x = zip(a, strict=True)",
        "A: TypeAlias = B | C",
        "x: Literal[3] = y",
        "@decorated(1)\ndef f(a: Literal[2]) -> Literal[3]: ...",
        "def f():\n    _log.warning('%d', 1 + 2)",
        "def f():\n    x = f'{a + 1}'",
        "def f():\n    yield",
        "class A:\n    x: int\n    'A docstring of 3 words.'",
        "if TYPE_CHECKING:\n    x = 1 < 2",
        "class A:\n    def __init__(self, a):\n        self.a = a",
    ],
)
def test_what_says_nothing_to_the_program_is_left_alone(source: str) -> None:
    assert changed(source) == set()


def test_of_a_raise_only_that_it_happens_is_changed() -> None:
    assert in_function("raise ValueError(1 + 2)") == {"pass"}


def test_a_limit_at_the_top_is_taken_away_and_not_moved() -> None:
    assert changed("_MAX = 8") == {"_MAX = (8) * 1000", "_MAX = 0"}
    assert changed("_MAX_BYTES = 8 * 2**20") == {"_MAX_BYTES = (8 * 2 ** 20) * 1000", "_MAX_BYTES = 0"}
    assert changed("_NAME = 'a'") == set()


def test_the_rest_of_the_text_stays_as_it_is() -> None:
    source = 'def f():\n    x = "ä"; y = (a <  # why\n         b)\n    return y\n'.encode()
    negated = next(each for each in mutants_of(source) if each.operator == "comparison negated")
    assert negated.applied_to(source).decode() == 'def f():\n    x = "ä"; y = ((a >= b))\n    return y\n'
    assert negated.line == 2
