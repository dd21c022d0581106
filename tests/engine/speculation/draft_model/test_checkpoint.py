"""The checkpoint of a draft model: what does not fit is refused in one sentence, what fits has room in each block."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.engine.model_shard import fingerprint_of, load_shard, open_basis
from baton.engine.models.shard import WHOLE
from baton.engine.settings import OWN, EngineSettings
from baton.wire.errors import InvalidSetting, ModelLoadError
from baton.wire.fingerprint import checkpoint_of, difference
from tests.checkpoints import make_checkpoint
from tests.engine.models.families import make_model


def settings_of(target: Path, draft: Path, **values: Any) -> EngineSettings:
    config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3, **values}
    return EngineSettings(model=str(target), num_threads=1, speculative_config=json.dumps(config))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "target", "llama")


def test_its_layers_lie_behind_the_models_in_each_block(tmp_path: Path, target: Path) -> None:
    draft = make_checkpoint(tmp_path / "draft", "qwen3", changes={"num_hidden_layers": 1})
    basis = open_basis(settings_of(target, draft), 1)
    model = load_shard(basis, WHOLE, None, None)
    assert basis.draft is not None
    assert model.layout.layers == (*model.own.layers, *basis.draft.kvs)
    assert (model.own.num_layers, model.layout.num_layers) == (2, 3)
    assert model.layout.layers[-1].head_dim == 32


def test_the_fingerprint_covers_it(tmp_path: Path, target: Path) -> None:
    """And a node without the same one is told so."""
    found = []
    for number in range(2):
        draft = make_checkpoint(tmp_path / str(number), "llama", seed=number)
        for quantization in (None, "int8"):
            basis = open_basis(settings_of(target, draft, quantization=quantization), 1)
            found.append(fingerprint_of(basis, load_shard(basis, WHOLE, None, None)))
    basis = open_basis(replace(basis.settings, speculative_config=""), 1)
    plain = fingerprint_of(basis, load_shard(basis, WHOLE, None, None))
    assert len({plain, *found}) == 5
    assert {checkpoint_of(each) for each in found} == {plain}
    identity = found[0].removeprefix(f"{plain}+draft-")
    assert difference(plain, found[0], "node-2") == (
        f"draft model differs: none here, {identity} at node-2 (see --speculative-config)"
    )
    assert len(f"{plain}+int8+kv-fp8_e4m3+draft-{identity}") <= 64  # what the root of block hashes takes


@pytest.mark.parametrize(
    ("changes", "values", "reason"),
    [
        ({"vocab_size": 400}, {}, "has 400 tokens and the model 320: a draft has to be of the same vocabulary"),
        ({}, {"draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size"),
        ({}, {"use_heterogeneous_vocab": True}, "unknown field `use_heterogeneous_vocab`"),
        ({}, {"max_model_len": 1}, "max_model_len"),
        ({}, {"rejection_sample_method": "block"}, "'block' - at `.*rejection_sample_method`"),
        ({}, {"draft_sample_method": "beam"}, "'beam' - at `.*draft_sample_method`"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, target: Path, changes: dict[str, int], values: dict[str, Any], reason: str
) -> None:
    draft = make_checkpoint(tmp_path / "draft", "llama", **changes)  # type: ignore[arg-type]
    with pytest.raises(InvalidSetting, match=reason) as found:
        open_basis(settings_of(target, draft, **values), 1)
    assert str(found.value).startswith("--speculative-config")


def test_another_tokenizer_is_refused(tmp_path: Path, target: Path) -> None:
    draft = make_checkpoint(tmp_path / "draft", "llama")
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = tokenizer["added_tokens"][:-1]
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(InvalidSetting, match="another tokenizer"):
        open_basis(settings_of(target, draft), 1)


def test_a_draft_with_states_is_refused(tmp_path: Path) -> None:
    target, draft = (tmp_path / name for name in ("target", "draft"))
    for folder, family in ((target, "llama"), (draft, "lfm2")):
        folder.mkdir()
        make_model(folder, family)
    with pytest.raises(InvalidSetting, match="has states"):
        open_basis(settings_of(target, draft), 1)


def test_a_checkpoint_that_is_not_there_is_named(tmp_path: Path, target: Path) -> None:
    with pytest.raises(ModelLoadError, match="nowhere"):
        open_basis(settings_of(target, tmp_path / "nowhere"), 1)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"tensor_parallel_size": 2, "rank_pools": OWN}, "a KV pool of its own"),
        ({"pipeline_parallel_size": 2}, "divided among stages"),
    ],
)
def test_nodes_that_cannot_have_one_say_so_and_go_on(
    tmp_path: Path, target: Path, values: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings = settings_of(target, make_checkpoint(tmp_path / "draft", "llama"))
    assert open_basis(replace(settings, **values), 1).draft is None
    assert reason in caplog.text
