from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.engine.models.generation_defaults import GenerationDefaults, load_generation_defaults
from baton.wire.errors import InvalidSetting, ModelLoadError
from baton.wire.sampling import DecodingParams


def folder_with(tmp_path: Path, **fields: object) -> Path:
    (tmp_path / "generation_config.json").write_text(json.dumps(fields))
    return tmp_path


def test_the_sampling_of_the_file_counts_and_nothing_else_of_it(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, temperature=0.6, top_k=20, top_p=0.95, do_sample=False, eos_token_id=2, min_p=None)
    found = load_generation_defaults("auto", folder)
    assert found == GenerationDefaults({"temperature": 0.6, "top_k": 20, "top_p": 0.95})
    assert found.missing_in({"temperature", "n"}) == {"top_k": 20, "top_p": 0.95}
    assert str(found) == "temperature 0.6, top_p 0.95, top_k 20"
    assert load_generation_defaults("auto", tmp_path / "nothing") == GenerationDefaults()


@pytest.mark.parametrize("setting", ["none", "vllm"])
def test_they_can_be_left_out(tmp_path: Path, setting: str) -> None:
    assert load_generation_defaults(setting, folder_with(tmp_path, temperature=0.6)) == GenerationDefaults()


def test_another_folder_can_be_named(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, repetition_penalty=1.1)
    assert load_generation_defaults(str(folder), tmp_path / "model").values == {"repetition_penalty": 1.1}
    with pytest.raises(InvalidSetting, match="is neither auto, nor none, nor a folder"):
        load_generation_defaults("defaults", folder)


def test_no_request_gets_more_tokens_than_the_file_says(tmp_path: Path) -> None:
    found = load_generation_defaults("auto", folder_with(tmp_path, max_new_tokens=64))
    assert found.values == {}
    for asked, given in ((None, 64), (10, 10), (100, 64)):
        assert found.limited(DecodingParams(max_tokens=asked)).max_tokens == given


def test_values_that_no_request_may_have_are_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json: temperature must lie .* --generation-config none"):
        load_generation_defaults("auto", folder_with(tmp_path, temperature=9))
    with pytest.raises(ModelLoadError, match="top_k must be an integer"):
        load_generation_defaults("auto", folder_with(tmp_path, top_k="20"))
