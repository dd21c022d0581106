"""A checkpoint without tokenizer.json is converted once, in a child process."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from baton.engine.text.conversion_cache import find_tokenizer_file
from baton.engine.text.convert import main
from baton.engine.text.tokenizer import Tokenizer
from baton.wire.errors import ModelLoadError


@pytest.fixture
def older_checkpoint(checkpoints: Mapping[str, Path], tmp_path: Path) -> Path:
    """The byte-level tokenizer as GPT-2 was published: vocab.json and merges.txt."""
    folder = tmp_path / "older"
    folder.mkdir()
    model = json.loads((checkpoints["byte_level"] / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "\n".join(" ".join(merge) for merge in model["merges"])
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    return folder


def test_converts_once_and_again_only_when_the_sources_change(
    checkpoints: Mapping[str, Path], older_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    converted = Tokenizer.from_folder(older_checkpoint, cache_folder=cache)
    text = "Hello world, naïve 😀"
    assert converted.encode(text) == Tokenizer.from_folder(checkpoints["byte_level"]).encode(text)
    assert len(list(cache.iterdir())) == 1

    monkeypatch.setattr(sys, "executable", "/bin/false")  # from here on a child process fails
    assert find_tokenizer_file(older_checkpoint, cache).is_file()
    changed = (older_checkpoint / "merges.txt").read_text().replace("0.2", "0.3")
    (older_checkpoint / "merges.txt").write_text(changed)
    with pytest.raises(ModelLoadError, match="exited with status 1"):
        find_tokenizer_file(older_checkpoint, cache)


def test_a_failed_conversion_says_why_and_leaves_nothing(
    older_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = tmp_path / "fails"
    fails.write_text("#!/bin/sh\necho 'a line of a log' >&2\necho 'ValueError: no vocabulary' >&2\nexit 1\n")
    fails.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(fails))
    cache = tmp_path / "cache"
    with pytest.raises(ModelLoadError, match=r"cannot convert the tokenizer of .*: ValueError: no vocabulary$"):
        find_tokenizer_file(older_checkpoint, cache)
    assert list(cache.iterdir()) == []


def test_the_reason_for_a_failed_conversion_is_the_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"not a sentencepiece model")
    monkeypatch.setattr(sys, "argv", ["convert", str(tmp_path), str(tmp_path / "tokenizer.json")])
    assert main() == 1
    assert "Error: " in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "tokenizer.json").exists()


def test_a_cache_folder_that_cannot_be_made_is_named(older_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelLoadError, match=r"Not a directory|File exists"):
        find_tokenizer_file(older_checkpoint, tmp_path / "file" / "cache")


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="has no tokenizer"):
        find_tokenizer_file(tmp_path)


def test_the_users_cache_folder_follows_the_environment(
    tmp_path: Path, older_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ModelLoadError):
        find_tokenizer_file(older_checkpoint)
    assert (tmp_path / "xdg" / "baton" / "tokenizers").is_dir()
