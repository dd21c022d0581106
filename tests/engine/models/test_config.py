from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from baton.engine.models.architecture_facts import architecture_facts
from baton.engine.models.config import ModelConfig, load_config, parse_config
from baton.engine.models.rope_settings import RopeSettings
from baton.wire.errors import ModelLoadError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
}


def parsed(architecture: str = "LlamaForCausalLM", **changes: object) -> ModelConfig:
    return parse_config({**LLAMA, "architectures": [architecture], **changes})


def test_a_plain_file_becomes_sizes_and_defaults() -> None:
    config = parsed()
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (3, 4, 2, 16)
    assert config.rope == RopeSettings(theta=10000.0)
    assert config.windows == (None, None, None)
    assert not config.tie_word_embeddings
    assert config.dtype is None
    assert config.eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("architecture", "flags", "biases"),
    [
        ("LlamaForCausalLM", {}, (False, False, False)),
        ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}, (True, True, True)),
        ("MistralForCausalLM", {"attention_bias": True}, (False, False, False)),
        ("Qwen2ForCausalLM", {}, (True, False, False)),
        ("Qwen3ForCausalLM", {}, (False, False, False)),
        ("Qwen3ForCausalLM", {"attention_bias": True}, (True, True, False)),
    ],
)
def test_biases_follow_the_family(architecture: str, flags: dict[str, object], biases: tuple[bool, bool, bool]) -> None:
    config = parsed(architecture, **flags)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == biases


def test_qwen3_norms_heads_and_defaults_to_128_elements() -> None:
    config = parsed("Qwen3ForCausalLM")
    assert config.qk_norm
    assert config.head_dim == 128
    assert parsed("Qwen3ForCausalLM", head_dim=32).head_dim == 32


def test_a_file_without_kv_heads_means_one_per_head_for_llama_only() -> None:
    without = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
    assert parse_config(without).num_kv_heads == 4
    with pytest.raises(ModelLoadError, match="num_key_value_heads is missing"):
        parse_config({**without, "architectures": ["Qwen2ForCausalLM"]})


@pytest.mark.parametrize(
    ("architecture", "fields", "windows"),
    [
        ("LlamaForCausalLM", {"sliding_window": 8}, (None, None, None)),
        ("MistralForCausalLM", {}, (4096, 4096, 4096)),
        ("MistralForCausalLM", {"sliding_window": 8}, (8, 8, 8)),
        ("MistralForCausalLM", {"sliding_window": None}, (None, None, None)),
        ("Qwen2ForCausalLM", {"use_sliding_window": False, "sliding_window": 8}, (None, None, None)),
        (
            "Qwen2ForCausalLM",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
            (None, None, 8),
        ),
        (
            "Qwen3ForCausalLM",
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (8, None, 8),
        ),
    ],
)
def test_windows_are_per_layer(architecture: str, fields: dict[str, object], windows: tuple[int | None, ...]) -> None:
    assert parsed(architecture, **fields).windows == windows


def test_old_and_new_rope_spellings_mean_the_same() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    old = parsed(rope_theta=500000.0, rope_scaling={"type": "llama3", **scaling})
    new = parsed(rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, **scaling})
    assert old.rope == new.rope
    assert old.rope.theta == 500000.0
    assert old.rope.factor == 8.0


def test_an_original_length_beside_the_rope_fields_wins_as_in_transformers() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert parsed(rope_scaling=yarn, original_max_position_embeddings=64).rope.original_max_position == 64
    assert parsed(rope_scaling={"type": "yarn", "factor": 4.0}).rope.original_max_position == 512


def test_yarn_stretches_the_context_and_others_do_not() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert parsed(rope_parameters=yarn).max_context_len == 2048
    assert parsed(rope_parameters={"rope_type": "dynamic", "factor": 4.0}).max_context_len == 2048
    assert parsed(rope_parameters={"rope_type": "linear", "factor": 2.5}).max_context_len == 1280


def test_dtype_is_read_in_both_spellings() -> None:
    assert parsed(torch_dtype="bfloat16").dtype == "bfloat16"
    assert parsed(dtype="float16", torch_dtype="float32").dtype == "float16"


def test_end_tokens_of_both_files_are_united(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "eos_token_id": 9}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 7]}))
    assert load_config(tmp_path).eos_token_ids == (7, 9)


def test_end_tokens_of_a_family_count_where_both_files_are_silent(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert load_config(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert load_config(tmp_path).eos_token_ids == (7,)
    (tmp_path / "generation_config.json").write_text("{}")
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "eos_token_id": None}))
    assert load_config(tmp_path).eos_token_ids == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "vocab_size must be a positive integer, got 0"),
        ({"hidden_size": None}, "hidden_size must be a positive integer, got None"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be a positive integer, got True"),
        ({"intermediate_size": "128"}, "intermediate_size must be a positive integer, got '128'"),
        ({"max_position_embeddings": 512.0}, "max_position_embeddings must be a positive integer"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number, got nan"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a positive number"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads must be a divisor of num_attention_heads \(4\), got 3"),
        ({"num_attention_heads": 6}, r"hidden_size must be a multiple of num_attention_heads \(6\), got 64"),
        ({"head_dim": 15}, "head_dim must be even to be rotated, got 15"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false, got 'yes'"),
        ({"hidden_act": "relu6"}, "hidden_act 'relu6' is not supported; supported: silu"),
        ({"quantization_config": {"quant_method": "aqlm"}}, r"quantization_config \(quant_method 'aqlm'\)"),
        ({"quantization_config": "awq"}, r"quantization_config \(quant_method 'awq'\)"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1"),
        ({"eos_token_id": [2, -1]}, r"eos_token_id must be a token id or a list of token ids, got \[2, -1\]"),
        ({"torch_dtype": 16}, "torch_dtype must be the name of a dtype, got 16"),
        ({"rope_theta": -1}, "rope_theta must be a positive number, got -1"),
        ({"rope_scaling": [2.0]}, r"rope_scaling must be an object or null, got \[2.0\]"),
        (
            {"rope_scaling": {"rope_type": "proportional"}},
            "'proportional' is not supported; supported: default, linear",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling: factor is missing"),
        ({"rope_parameters": {"full_attention": {}}}, "rope_parameters: unknown fields full_attention"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
            r"high_freq_factor must be above low_freq_factor \(4.0\), got 4",
        ),
    ],
)
def test_a_field_that_cannot_be_is_named_with_its_value(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        parse_config({**LLAMA, **changes})


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("MistralForCausalLM", {"layer_types": ["full_attention"] * 3}, "layer_types must be absent"),
        ("MistralForCausalLM", {"sliding_window": 0}, "sliding_window must be a positive integer, got 0"),
        ("Qwen2ForCausalLM", {"layer_types": ["full_attention"]}, "layer_types must be a list of 3 of"),
        ("Qwen2ForCausalLM", {"layer_types": ["sliding_attention"] * 3}, "use_sliding_window is not true"),
        (
            "Qwen2ForCausalLM",
            {"use_sliding_window": True, "max_window_layers": -1},
            "max_window_layers must be an integer that is not negative, got -1",
        ),
    ],
)
def test_contradicting_window_fields_are_refused(architecture: str, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        parsed(architecture, **changes)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"{", "not valid JSON"), (b"\xff\xfe{}", "not valid JSON"), (b"[]", "must hold a JSON object, got list")],
)
def test_a_file_that_is_no_json_object_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelLoadError, match=message):
        load_config(tmp_path)


def test_a_folder_without_config_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"not a checkpoint, it has no config\.json"):
        load_config(tmp_path)


def test_facts_change_with_what_is_computed_and_with_nothing_else() -> None:
    facts = architecture_facts(parsed())
    assert list(facts) == sorted(facts)
    assert architecture_facts(parsed(torch_dtype="float16", eos_token_id=5, bos_token_id=6)) == facts
    for changed in (
        {"rope_theta": 5e5},
        {"attention_bias": True},
        {"rms_norm_eps": 1e-6},
        {"tie_word_embeddings": True},
    ):
        assert architecture_facts(parsed(**changed)) != facts
    windowed = dataclasses.replace(parsed(), windows=(None, 8, None))
    assert architecture_facts(windowed) != facts


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_hidden_layers", 10**8), ("vocab_size", 10**12), ("hidden_size", 2**40), ("max_position_embeddings", 2**60)],
)
def test_sizes_that_no_model_has_are_refused_before_anything_is_made(field: str, value: int) -> None:
    with pytest.raises(ModelLoadError, match=rf"{field} must be at most \d+, got {value}"):
        parse_config({**LLAMA, field: value})
