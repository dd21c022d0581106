"""Checkpoints that see images, too: their text part is computed as transformers does, whoever wrote the files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from baton.engine.models.config import load_config, parse_config
from baton.engine.models.facts import load_facts
from baton.engine.models.text_part import TEXT_PARTS
from baton.engine.models.weight_files import SINGLE_FILE
from baton.wire.errors import ModelLoadError
from tests.checkpoints import write_weights
from tests.engine.models.families import SEEING, make_model
from tests.engine.models.test_families import answers, assert_same, built, prompts

_TEXT = "model.language_model."


def read_config(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return content


@pytest.mark.parametrize("family", SEEING)
def test_text_equals_that_of_transformers(tmp_path: Path, family: str) -> None:
    model = make_model(tmp_path, family)
    assert type(model).__name__ in TEXT_PARTS
    engine = built(tmp_path)
    for answer in answers(engine, *prompts()):
        assert_same(model, answer)


def _as_first_published(name: str) -> str:
    """Names of older files, in which the text part is a whole model."""
    if name.startswith(_TEXT):
        return f"language_model.model.{name.removeprefix(_TEXT)}"
    return f"language_model.{name}" if name.startswith("lm_head") else name.removeprefix("model.")


def _beside_the_tower(name: str) -> str:
    """Names of files in which the text part is called as a model of text alone is."""
    return name.replace(_TEXT, "model.").replace("model.visual.", "visual.")


@pytest.mark.parametrize("renamed", [_as_first_published, _beside_the_tower])
def test_names_of_tensors_are_found_whoever_wrote_them(tmp_path: Path, renamed: Callable[[str], str]) -> None:
    model = make_model(tmp_path, "qwen2.5-vl")
    tensors = load_file(tmp_path / SINGLE_FILE)
    write_weights(tmp_path, {renamed(_nested(name)): tensor for name, tensor in tensors.items()})
    (answer,) = answers(built(tmp_path), prompts()[0])
    assert_same(model, answer)


def _nested(name: str) -> str:
    """A name as transformers has it in memory: the text part beside the tower, both in the model."""
    if name.startswith("visual."):
        return f"model.{name}"
    is_text = name.startswith("model.") and not name.startswith((_TEXT, "model.visual."))
    return name.replace("model.", _TEXT, 1) if is_text else name


def test_fields_may_stand_beside_those_of_the_tower(tmp_path: Path) -> None:
    model = make_model(tmp_path, "qwen2.5-vl")
    content = read_config(tmp_path)
    rope = {"rope_theta": 1e4, "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]}}
    flat = {**content.pop("text_config"), **content, **rope}
    del flat["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(flat))
    (answer,) = answers(built(tmp_path), prompts()[0])
    assert_same(model, answer)


def test_what_published_files_leave_out_is_filled_in() -> None:
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    scaling = {"factor": 8.0, "rope_type": "linear"}
    config = parse_config(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "text_config": {**text, "rope_scaling": scaling},
            "eos_token_id": [1, 106],
            "torch_dtype": "bfloat16",
            "vision_config": {"hidden_size": 1152},
        }
    )
    assert (config.vocab_size, config.num_heads, config.num_kv_heads, config.head_dim) == (262_208, 8, 4, 256)
    assert config.windows[4:7] == (1024, None, 1024)
    assert (config.rope.factor, config.rope.theta) == (8.0, 1e6)
    assert config.local_rope is not None
    assert (config.local_rope.factor, config.local_rope.theta) == (1.0, 1e4)
    assert (config.tie_word_embeddings, config.eos_token_ids, config.dtype) == (True, (1, 106), "bfloat16")


@pytest.mark.parametrize(
    ("whole", "text", "is_tied"),
    [(None, None, False), (True, None, True), (None, True, True), (False, True, True), (False, False, False)],
)
def test_the_head_of_qwens_text_is_tied_when_either_says_so(whole: object, text: object, is_tied: bool) -> None:
    content = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "tie_word_embeddings": whole,
        "text_config": {
            "vocab_size": 320,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "tie_word_embeddings": text,
        },
    }
    assert parse_config(content).tie_word_embeddings == is_tied


def test_a_text_part_that_is_no_object_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="text_config must be an object, got 7"):
        parse_config({"architectures": ["Qwen3VLForConditionalGeneration"], "text_config": 7})


@pytest.mark.parametrize("impl", ["auto", "transformers"])
def test_other_models_that_see_are_refused_by_name(tmp_path: Path, impl: str) -> None:
    make_model(tmp_path, "qwen3-vl")
    assert load_config(tmp_path).architecture == "Qwen3ForCausalLM"
    content = {**read_config(tmp_path), "architectures": ["Qwen3VLMoeForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(
        ModelLoadError, match=r"Qwen3VLMoeForCond.* cannot be .* it sees images, .* text part are .*Gemma3"
    ):
        load_facts(tmp_path, impl)
