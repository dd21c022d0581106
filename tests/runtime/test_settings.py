from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.runtime.command_line import CommandParser
from baton.runtime.ranges import Range
from baton.runtime.settings import add_flags, as_flags, check_file_keys, resolve, secret_environment, setting
from baton.wire.errors import InvalidSetting


@dataclass(frozen=True, slots=True)
class Sample:
    model: str = setting("", "folder", positional=True)
    block_size: int = setting(16, "tokens", allowed=Range(1, 4096))
    lease_s: float = setting(10.0, "seconds, 100%", allowed=Range(-1e300, 1e300))
    enable_cache: bool = setting(True, "reuse")
    dtype: str = setting("auto", "type", choices=("auto", "float32"))
    limit: int | None = setting(None, "optional")
    rate: float = setting(math.inf, "per second", allowed=Range(-math.inf, math.inf))
    goals: tuple[str, ...] = setting((), "what is good enough", group="goals", metavar="NAME:MS")
    sizes: tuple[int, ...] = setting((1, 8), "blocks", group="goals")
    no_repeats: bool = setting(False, "each only once")
    tokens: int = setting(1, "at once", short="-t")


@dataclass(frozen=True, slots=True)
class Reading:
    files: tuple[str, ...] = setting((), "what to read", positional=True)
    depth: int = setting(1, "levels")


def resolved(*arguments: str, environment: dict[str, str] | None = None) -> Sample:
    parser = CommandParser(prog="baton")
    add_flags(parser, Sample)
    return resolve(Sample, parser.parse(arguments), environment or {})


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "baton.yaml"
    path.write_text("block-size: 4\nlease_s: 2\nenable-cache: no\n")
    return path


def test_a_flag_beats_the_environment_which_beats_the_file_which_beats_the_default(config: Path) -> None:
    environment = {"BATON_LEASE_S": "3.5", "BATON_BLOCK_SIZE": "8"}
    found = resolved(f"--config={config}", "--block-size=32", environment=environment)
    assert found == Sample(block_size=32, lease_s=3.5, enable_cache=False)


@pytest.mark.parametrize(
    ("arguments", "environment", "origin"),
    [
        (["--block-size=many"], {}, "--block-size"),
        (["--lease-s=nan"], {}, "--lease-s"),
        (["--dtype=int3"], {}, "--dtype"),
        ([], {"BATON_BLOCK_SIZE": "4.5"}, "BATON_BLOCK_SIZE"),
        ([], {"BATON_ENABLE_CACHE": "perhaps"}, "BATON_ENABLE_CACHE"),
        (["--lease-s=inf"], {}, "--lease-s"),
        (["--rate=nan"], {}, "--rate"),
        (["--sizes", "1", "many"], {}, "--sizes"),
        ([], {"BATON_GOALS": "ttft:'200"}, "BATON_GOALS"),
    ],
)
def test_a_bad_value_names_where_it_came_from(arguments: list[str], environment: dict[str, str], origin: str) -> None:
    with pytest.raises(InvalidSetting, match=origin):
        resolved(*arguments, environment=environment)


@pytest.mark.parametrize("line", ["block_size: 4.5", "block_size: true", "model:", "model: [a]", "lease_s: .inf"])
def test_a_bad_value_in_the_file_names_file_and_key(tmp_path: Path, line: str) -> None:
    path = tmp_path / "baton.yaml"
    path.write_text(line)
    with pytest.raises(InvalidSetting, match=f"baton.yaml: {line.split(':')[0]}"):
        resolved(f"--config={path}")


def test_a_tuple_takes_several_values_of_one_flag_and_of_the_flag_again() -> None:
    found = resolved("--goals", "ttft:200", "tpot:50", "--sizes", "2", "3", "--goals=e2el:900")
    assert (found.goals, found.sizes) == (("ttft:200", "tpot:50", "e2el:900"), (2, 3))
    assert resolved().sizes == (1, 8)
    assert resolved("--sizes=").sizes == ()


def test_a_tuple_in_the_environment_is_words_and_in_the_file_a_list_or_words(tmp_path: Path) -> None:
    path = tmp_path / "baton.yaml"
    path.write_text("goals: [ttft:200, 'x: y']\nsizes: 4 5")
    found = resolved(f"--config={path}")
    assert (found.goals, found.sizes) == (("ttft:200", "x: y"), (4, 5))
    assert resolved(environment={"BATON_GOALS": "ttft:200 'x: y'"}).goals == ("ttft:200", "x: y")


def test_a_number_is_infinite_where_its_field_allows_it(tmp_path: Path) -> None:
    path = tmp_path / "baton.yaml"
    path.write_text("rate: .inf")
    assert resolved("--rate=2.5").rate == 2.5
    assert resolved("--rate=inf").rate == resolved(f"--config={path}").rate == math.inf


def test_positional_arguments_may_be_several() -> None:
    parser = CommandParser(prog="baton")
    add_flags(parser, Reading)
    for settings in (Reading(), Reading(("a", "b c"), 2), Reading(depth=3)):
        assert resolve(Reading, parser.parse(as_flags(settings)), {}) == settings
    assert resolve(Reading, parser.parse([]), {"BATON_FILES": "a b"}).files == ("a", "b")


def test_a_misspelt_key_in_the_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "baton.yaml"
    path.write_text("block-sise: 4")
    with pytest.raises(InvalidSetting, match="block_sise"):
        check_file_keys(str(path), Sample)


@pytest.mark.parametrize("content", ["[1, 2]", "a: [", "\x00"])
def test_a_file_that_is_no_map_of_settings_is_an_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "baton.yaml"
    path.write_text(content)
    with pytest.raises(InvalidSetting, match="--config"):
        resolved(f"--config={path}")


def test_a_missing_file_is_an_error() -> None:
    with pytest.raises(InvalidSetting, match="nowhere"):
        resolved("--config=/nowhere.yaml")


def test_booleans_have_a_negative_flag() -> None:
    assert resolved("--no-enable-cache").enable_cache is False
    assert resolved("--enable-cache", environment={"BATON_ENABLE_CACHE": "0"}).enable_cache is True


def test_a_flag_that_begins_with_no_is_no_negation() -> None:
    assert resolved("--no-repeats").no_repeats is True
    assert resolved().no_repeats is False


def test_a_flag_may_have_a_short_name() -> None:
    assert resolved("-t", "2").tokens == resolved("-t=2").tokens == resolved("--tokens", "2").tokens == 2


@pytest.mark.parametrize("name", ["BATON_GOALS", "BATON_MODEL"])
def test_what_would_be_lost_on_its_way_to_another_program_is_refused(name: str) -> None:
    with pytest.raises(InvalidSetting, match=f"{name}: '--' is no value"):
        resolved(environment={name: "--"})


@given(
    st.builds(
        Sample,
        model=st.from_regex(r"[A-Za-z/][A-Za-z0-9/._-]*", fullmatch=True),
        block_size=st.integers(1, 4096),
        lease_s=st.floats(-1e300, 1e300),
        enable_cache=st.booleans(),
        dtype=st.sampled_from(["auto", "float32"]),
        limit=st.none() | st.integers(),
        rate=st.floats(allow_nan=False),
        goals=st.lists(st.text(min_size=1).filter(lambda word: word != "--")).map(tuple),
        sizes=st.lists(st.integers()).map(tuple),
        no_repeats=st.booleans(),
    )
)
def test_flags_rebuild_the_settings_they_were_made_of(settings: Sample) -> None:
    assert resolved(*as_flags(settings)) == settings


@dataclass(frozen=True)
class Guarded:
    url: str = setting("", "where it is", secret=True)
    model: str = setting("", "what it is")


def test_a_secret_is_not_shown_and_reaches_a_child_by_its_environment() -> None:
    settings = Guarded("redis://:horse@host", "some/model")
    flags, environment = as_flags(settings), secret_environment(settings)
    assert "horse" not in f"{flags} {settings!r}"
    parser = CommandParser(prog="baton")
    add_flags(parser, Guarded)
    assert resolve(Guarded, parser.parse(flags), environment) == settings
    assert secret_environment(Guarded(model="some/model")) == {}


def test_a_field_of_two_classes_is_one_flag() -> None:
    parser = CommandParser(prog="baton")
    add_flags(parser, Sample, Sample)
    flags: dict[str, Any] = vars(parser.parse(["--block-size=2"]))
    assert flags["block_size"] == "2"


def test_help_shows_every_field_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    parser = CommandParser(prog="baton")
    add_flags(parser, Sample)
    parser.print_help()
    shown = capsys.readouterr().out
    assert "--lease-s" in shown
    assert "100%" in shown
    assert "(default: auto)" in shown
    assert "(default: 16; from 1 to 4096)" in shown


def shown_by(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit, match="0"):
        resolved(*arguments)
    return capsys.readouterr().out


def test_help_shows_the_usual_settings_and_names_each_group_with_its_flags(capsys: pytest.CaptureFixture[str]) -> None:
    shown = shown_by(capsys, "--help")
    assert "--rate FLOAT" in shown
    assert "--goals NAME" not in shown
    assert shown.splitlines()[-2:] == [
        "more flags, by group (--help GROUP shows one, --help-all every flag):",
        "  goals  --goals --sizes",
    ]


def test_help_lists_settings_under_their_group(capsys: pytest.CaptureFixture[str]) -> None:
    before, _, after = shown_by(capsys, "--help", "all").partition("\ngoals:\n")
    assert "--rate FLOAT" in before
    assert "--goals NAME:MS [NAME:MS ...]" in after
    assert "(default: 1 8; from -inf to inf)" in after
    assert shown_by(capsys, "--help=goals") == f"goals:\n{after}"
    assert shown_by(capsys, "--help-all") == shown_by(capsys, "--help", "all")


def test_a_group_that_there_is_not_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        resolved("--help=goal")
    assert capsys.readouterr().err == "error: there is no group of flags 'goal', but goals, all (baton --help)\n"
