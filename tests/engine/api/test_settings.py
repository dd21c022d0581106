from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.api.errors import InvalidSetting
from engine.api.settings import add_flags, as_flags, check_file_keys, resolve, setting


@dataclass(frozen=True, slots=True)
class Sample:
    model: str = setting("", "folder", positional=True)
    block_size: int = setting(16, "tokens")
    lease_s: float = setting(10.0, "seconds, 100%")
    enable_cache: bool = setting(True, "reuse")
    dtype: str = setting("auto", "type", choices=("auto", "float32"))
    limit: int | None = setting(None, "optional")


def resolved(*arguments: str, environment: dict[str, str] | None = None) -> Sample:
    parser = argparse.ArgumentParser()
    add_flags(parser, Sample)
    return resolve(Sample, parser.parse_args(arguments), environment or {})


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


@given(
    st.builds(
        Sample,
        model=st.from_regex(r"[A-Za-z/][A-Za-z0-9/._-]*", fullmatch=True),
        block_size=st.integers(-5, 10**6),
        lease_s=st.floats(allow_nan=False, allow_infinity=False),
        enable_cache=st.booleans(),
        dtype=st.sampled_from(["auto", "float32"]),
        limit=st.none() | st.integers(),
    )
)
def test_flags_rebuild_the_settings_they_were_made_of(settings: Sample) -> None:
    assert resolved(*as_flags(settings)) == settings


def test_a_field_of_two_classes_is_one_flag() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, Sample, Sample)
    flags: dict[str, Any] = vars(parser.parse_args(["--block-size=2"]))
    assert flags["block_size"] == "2"


def test_help_shows_every_field_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, Sample)
    parser.print_help()
    shown = capsys.readouterr().out
    assert "--lease-s" in shown
    assert "100%" in shown
    assert "(default: 16)" in shown
