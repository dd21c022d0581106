"""Every number of every settings class, wherever it is: what its field allows is taken, and all else is one line."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from baton.runtime.command_line import CommandParser, number_in
from baton.runtime.ranges import ANY, Range
from baton.runtime.settings import add_flags, require_allowed, resolve
from baton.wire.errors import InvalidSetting
from tests.launch.supervised import ROOT

SOURCES = ("bench", "engine", "launch", "node", "ranks", "router")


def settings_classes() -> list[type[Any]]:
    paths = (path for folder in SOURCES for path in (ROOT / "baton" / folder).rglob("*.py"))
    modules = [_module_of(path) for path in sorted(paths) if "= setting(" in path.read_text()]
    members = dict.fromkeys(member for module in modules for _, member in inspect.getmembers(module, inspect.isclass))
    classes = [each for each in members if dataclasses.is_dataclass(each)]
    return [each for each in classes if any("allowed" in field.metadata for field in dataclasses.fields(each))]


def _module_of(path: Path) -> Any:
    return importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))


def numbers_of(settings_class: type[Any]) -> Iterator[tuple[dataclasses.Field[Any], type[Any]]]:
    hints = get_type_hints(settings_class)
    for field in dataclasses.fields(settings_class):
        kind = next((kind for kind in (float, int) if kind.__name__ in str(hints[field.name])), None)
        if kind is not None:
            yield field, kind


CLASSES = {f"{each.__module__}.{each.__name__}": each for each in settings_classes()}
each_class = pytest.mark.parametrize("settings_class", CLASSES.values(), ids=CLASSES)


def parser_of(settings_class: type[Any]) -> CommandParser:
    parser = CommandParser(prog="baton")
    add_flags(parser, settings_class)
    return parser


def parsed(parser: CommandParser, settings_class: type[Any], field: dataclasses.Field[Any], text: str) -> Any:
    flags = parser.parse([f"--{field.name.replace('_', '-')}={text}"])
    value = getattr(resolve(settings_class, flags, {}), field.name)
    return value[0] if isinstance(value, tuple) else value


def beside(number: float, direction: float, kind: type[Any]) -> Any:
    return int(number) + int(direction) if kind is int else math.nextafter(number, direction * math.inf)


def test_the_numbers_of_every_program_are_looked_at() -> None:
    names = {each.__name__ for each in CLASSES.values()}
    assert {"ServeSettings", "RouterSettings", "MixedNodeSettings", "RankSettings", "ServeBenchSettings"} <= names


@each_class
def test_a_number_says_what_it_may_be(settings_class: type[Any]) -> None:
    parser = parser_of(settings_class)
    for field, kind in numbers_of(settings_class):
        allowed: Range = field.metadata["allowed"]
        assert allowed != ANY, field.name
        default: Any = field.default
        assert default in (None, ()) or default in allowed, field.name
        least = beside(allowed.least, 1, kind) if allowed.excludes_least else kind(allowed.least)
        assert parsed(parser, settings_class, field, repr(least)) == least, field.name
        most = allowed.most if math.isinf(allowed.most) else kind(allowed.most)
        assert parsed(parser, settings_class, field, repr(most)) == most, field.name


@each_class
def test_no_other_number_is_taken(settings_class: type[Any]) -> None:
    parser = parser_of(settings_class)
    for field, kind in numbers_of(settings_class):
        allowed: Range = field.metadata["allowed"]
        below = allowed.least if allowed.excludes_least else beside(allowed.least, -1, kind)
        wrong = [repr(below), "-inf", "nan", "many"]
        if not math.isinf(allowed.most):
            wrong += [repr(beside(allowed.most, 1, kind)), "inf", "1e400", "9" * 5000]
        for text in wrong:
            with pytest.raises(InvalidSetting, match=f"^--{field.name.replace('_', '-')}: ") as caught:
                parsed(parser, settings_class, field, text)
            assert len(str(caught.value)) < 300
            assert "\n" not in str(caught.value)


def test_settings_that_were_not_parsed_are_checked_too() -> None:
    @dataclasses.dataclass(frozen=True, slots=True)
    class Sample:
        rate: float | None = dataclasses.field(default=None, metadata={"allowed": Range(0, 1, excludes_least=True)})

    for rate in (None, 1.0, 0.5):
        require_allowed(Sample(rate))
    for rate in (0.0, 1.5, math.nan):
        with pytest.raises(InvalidSetting, match=r"^--rate: .* is not above 0, 1 at most$"):
            require_allowed(Sample(rate))


def test_an_argument_has_a_range_too(capsys: pytest.CaptureFixture[str]) -> None:
    parser = CommandParser(prog="baton drain")
    parser.add_argument("--timeout-s", type=number_in(Range(0, 9)))
    assert parser.parse(["--timeout-s=9"]).timeout_s == 9
    for text in ("-1", "nan", "inf", "x"):
        with pytest.raises(SystemExit, match="2"):
            parser.parse([f"--timeout-s={text}"])
        assert capsys.readouterr().err.count("\n") == 1
