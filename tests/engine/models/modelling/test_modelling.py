"""Models in transformers' modelling code, through the whole engine: as transformers alone computes them, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from baton.engine.models.config import ModelConfig
from baton.engine.models.facts import load_facts
from baton.engine.models.modelling import model as modelling_model
from baton.engine.models.modelling.config import ModellingConfig, parse_modelling_config
from baton.engine.models.weight_files import SINGLE_FILE
from baton.wire.errors import InvalidSetting, ModelLoadError
from tests.checkpoints import make_checkpoint, write_weights
from tests.engine.models.families import make_model
from tests.engine.models.modelling.architectures import ALSO_COMPUTED, COMPUTED, REFUSED
from tests.engine.models.test_families import answers, assert_same, built, prompts


def changed(folder: Path, **fields: Any) -> Path:
    """The checkpoint in `folder` with other fields in its config."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return folder


@pytest.mark.parametrize("architecture", COMPUTED)
def test_tokens_equal_those_of_transformers(tmp_path: Path, architecture: str) -> None:
    model = make_model(tmp_path, COMPUTED[architecture])
    engine = built(tmp_path, model_impl="transformers")
    one, other = prompts()
    found = (*answers(engine, one), *answers(engine, other), *answers(engine, one, other))
    assert found[1].num_cached > 0
    for answer in found:
        assert_same(model, answer)


@pytest.mark.parametrize("reason", REFUSED)
def test_a_model_that_would_be_computed_wrongly_is_refused_by_name(tmp_path: Path, reason: str) -> None:
    family, words = REFUSED[reason]
    make_model(tmp_path, family)
    with pytest.raises(ModelLoadError, match=rf"ForCausalLM cannot be computed .*{words}"):
        built(tmp_path, model_impl="transformers", max_model_len=32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_whose_tokens_are_connected_elsewhere_is_noticed_by_its_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    make_model(tmp_path, COMPUTED["gemma"])
    computed = modelling_model.ModellingDecoder.forward

    def mixed(self: modelling_model.ModellingDecoder, ids: Tensor, positions: Tensor, attention: Any) -> Tensor:
        hidden = computed(self, ids, positions, attention)
        return hidden + 0.3 * hidden.roll(1, dims=0)

    built(tmp_path, dtype=dtype)
    monkeypatch.setattr(modelling_model.ModellingDecoder, "forward", mixed)
    with pytest.raises(ModelLoadError, match="in chunks and beside another one"):
        built(tmp_path, dtype=dtype)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}, "code of the checkpoint's own .--trust-remote-code"),
        ({"quantization_config": {"quant_method": "awq"}}, "its weights are quantized"),
        ({"is_encoder_decoder": True}, "an encoder"),
        ({"num_hidden_layers": 10**8}, "num_hidden_layers must be at most"),
        ({"architectures": ["NobodysForCausalLM"], "model_type": "nobodys"}, "nobodys"),
    ],
)
def test_what_the_config_says_already_is_refused_before_anything_is_loaded(
    tmp_path: Path, fields: dict[str, Any], words: str
) -> None:
    make_model(tmp_path, COMPUTED["gemma"])
    with pytest.raises(ModelLoadError, match=words):
        built(changed(tmp_path, **fields))


@pytest.mark.parametrize(
    ("model_type", "architecture", "reason"),
    [
        ("bloom", "BloomForCausalLM", r"names no number of positions, .* ALiBi \(BLOOM\)"),
        ("mamba", "MambaForCausalLM", r"names no number of positions, .* state in place of KV \(Mamba\)"),
        ("mamba2", "Mamba2ForCausalLM", "names no number of positions"),
        ("rwkv", "RwkvForCausalLM", "names no number of positions"),
        ("t5", "T5ForConditionalGeneration", "it has an encoder beside its decoder"),
        ("whisper", "WhisperForConditionalGeneration", "it has an encoder beside its decoder"),
        ("vit", "ViTForImageClassification", "names no vocabulary"),
    ],
)
def test_a_model_of_another_kind_is_refused_by_its_name_as_transformers_writes_it(
    model_type: str, architecture: str, reason: str
) -> None:
    content = {**AutoConfig.for_model(model_type).to_dict(), "architectures": [architecture]}
    with pytest.raises(ModelLoadError, match=f"^{architecture} cannot be computed .*{reason}"):
        parse_modelling_config(content, {})


def test_auto_takes_batons_own_decoder_where_there_is_one(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "llama", "llama")
    make_model(tmp_path / "gemma", COMPUTED["gemma"])
    assert isinstance(load_facts(tmp_path / "llama"), ModelConfig)
    assert isinstance(load_facts(tmp_path / "llama", "transformers"), ModellingConfig)
    assert isinstance(load_facts(tmp_path / "gemma"), ModellingConfig)
    with pytest.raises(ModelLoadError, match="architecture 'GemmaForCausalLM' is not supported"):
        load_facts(tmp_path / "gemma", "baton")


def test_nodes_with_other_code_do_not_share_kv(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    own, other = built(tmp_path), built(tmp_path, model_impl="transformers")
    assert own.fingerprint != other.fingerprint
    assert other.fingerprint == built(tmp_path, model_impl="transformers").fingerprint
    changed(tmp_path, rms_norm_eps=0.5)
    assert other.fingerprint != built(tmp_path, model_impl="transformers").fingerprint


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"tensor_parallel_size": 2}, "cannot be divided among ranks"), ({"quantization": "int8"}, "is not quantized")],
)
def test_what_only_batons_own_decoders_can_do_is_refused(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    make_model(tmp_path, COMPUTED["gemma"])
    with pytest.raises(InvalidSetting, match=words):
        built(tmp_path, **settings)


def test_files_that_lack_tensors_or_hold_nan_are_refused(tmp_path: Path) -> None:
    make_model(tmp_path, COMPUTED["gemma"])
    tensors = load_file(tmp_path / SINGLE_FILE)
    name = "model.layers.1.mlp.up_proj.weight"
    write_weights(tmp_path, {key: tensor for key, tensor in tensors.items() if key != name})
    with pytest.raises(ModelLoadError, match=rf"lacks 1 tensors: {name}"):
        built(tmp_path)
    write_weights(tmp_path, {**tensors, name: tensors[name].index_fill(0, torch.tensor([3]), float("nan"))})
    with pytest.raises(ModelLoadError, match=rf"NaN or infinite numbers in {name}"):
        built(tmp_path)
    write_weights(tmp_path, {**tensors, name: torch.zeros_like(tensors[name])})
    with pytest.raises(ModelLoadError, match=rf"{name} has nothing but zeros"):
        built(tmp_path)


def test_an_expert_that_is_missing_is_refused(tmp_path: Path) -> None:
    make_model(tmp_path, ALSO_COMPUTED["dots1"])
    tensors = load_file(tmp_path / SINGLE_FILE)
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    write_weights(tmp_path, {key: tensor for key, tensor in tensors.items() if key != name})
    with pytest.raises(ModelLoadError, match=f"lacks 1 tensors: {name}"):
        built(tmp_path)


def test_random_weights_are_the_same_on_every_node(tmp_path: Path) -> None:
    make_model(tmp_path, COMPUTED["gemma"])
    (tmp_path / SINGLE_FILE).unlink()
    first, second = (built(tmp_path, load_format="dummy") for _ in range(2))
    assert first.fingerprint == second.fingerprint
    (one,), (other,) = answers(first, prompts()[0]), answers(second, prompts()[0])
    assert one.tokens == other.tokens


def test_the_bits_of_a_batch_are_not_promised(tmp_path: Path) -> None:
    make_model(tmp_path, COMPUTED["gemma"])
    with pytest.raises(InvalidSetting, match="torch computes a part of GemmaForCausalLM"):
        built(tmp_path, batch_invariant=True)
