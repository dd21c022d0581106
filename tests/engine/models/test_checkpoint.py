from __future__ import annotations

import dataclasses
from pathlib import Path

import huggingface_hub.constants
import pytest

from baton.engine.models.checkpoint import choose_dtype, resolve_checkpoint
from baton.engine.models.config import ModelConfig, load_config
from baton.wire.errors import InvalidSetting, ModelLoadError
from tests.checkpoints import make_checkpoint

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache of its own, and no network."""
    cache = tmp_path / "cache"
    cache.mkdir()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return cache


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    return load_config(make_checkpoint(tmp_path / "model", "llama"))


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert resolve_checkpoint(str(tmp_path)) == tmp_path


def test_a_file_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(ModelLoadError, match=r"model\.bin' is a file, expected a checkpoint folder, a \.gguf file"):
        resolve_checkpoint(str(tmp_path / "model.bin"))


@pytest.mark.parametrize("weights", [True, False])
def test_a_hub_id_in_the_cache_is_its_snapshot(hub_cache: Path, weights: bool) -> None:
    repository = hub_cache / "models--someone--tiny"
    snapshot = make_checkpoint(repository / "snapshots" / COMMIT, "qwen3")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    assert resolve_checkpoint("someone/tiny", weights=weights) == snapshot


def test_a_hub_id_may_name_its_revision(hub_cache: Path) -> None:
    repository = hub_cache / "models--someone--tiny"
    snapshot = make_checkpoint(repository / "snapshots" / COMMIT, "qwen3")
    (repository / "refs").mkdir()
    (repository / "refs" / "v2").write_text(COMMIT)
    assert resolve_checkpoint("someone/tiny@v2") == resolve_checkpoint(f"someone/tiny@{COMMIT}") == snapshot
    for other in ("someone/tiny", "someone/tiny@v1"):
        with pytest.raises(ModelLoadError, match=f"{other}' is not a folder .*, is not in the local hub cache"):
            resolve_checkpoint(other)


def test_a_hub_id_that_is_nowhere_is_refused_with_the_places_and_the_command_that_fetches_it(hub_cache: Path) -> None:
    with pytest.raises(ModelLoadError) as refused:
        resolve_checkpoint("someone/absent@v1")
    message = str(refused.value)
    assert f"not a folder ({Path.cwd()}/someone/absent@v1 is not there)" in message
    assert f"not in the local hub cache ({hub_cache}) and cannot be downloaded: HF_HUB_OFFLINE is set" in message
    assert message.endswith("`hf download someone/absent --revision v1` fetches it")


@pytest.mark.usefixtures("hub_cache")
@pytest.mark.parametrize("model", ["", "/no/such/folder", "./missing", "a/b/c", "two words", "a..b"])
def test_a_path_that_is_nowhere_is_refused(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelLoadError, match=r"is neither a folder \(/.* is not there\) nor a valid hub id"):
        resolve_checkpoint(model)


@pytest.mark.parametrize(
    ("setting", "checkpoint", "chosen"),
    [
        ("auto", "bfloat16", "bfloat16"),
        ("auto", "float32", "float32"),
        ("auto", None, "float32"),
        ("float16", "bfloat16", "float16"),
        ("float32", "float8_e4m3fn", "float32"),
    ],
)
def test_dtype_is_the_setting_or_the_checkpoints(
    config: ModelConfig, setting: str, checkpoint: str | None, chosen: str
) -> None:
    assert choose_dtype(setting, dataclasses.replace(config, dtype=checkpoint)) == chosen


def test_unknown_dtypes_are_refused(config: ModelConfig) -> None:
    with pytest.raises(InvalidSetting, match=r"'int8' is not known; allowed: auto, bfloat16"):
        choose_dtype("int8", config)
    with pytest.raises(ModelLoadError, match="'float8_e4m3fn' cannot be computed in"):
        choose_dtype("auto", dataclasses.replace(config, dtype="float8_e4m3fn"))
