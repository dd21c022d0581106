from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from baton.engine.models.config import load_config
from baton.engine.models.decoder import Decoder
from baton.engine.models.loading import check_weights, load_weights
from baton.engine.models.ops.torch_ops import TorchOps
from baton.engine.models.shard import WHOLE, Shard
from baton.engine.models.weight_files import INDEX_FILE, SINGLE_FILE, weights_digest
from baton.wire.errors import ModelLoadError
from tests.checkpoints import make_checkpoint, write_weights


def loaded(folder: Path, dtype: torch.dtype = torch.float32, shard: Shard = WHOLE) -> dict[str, torch.Tensor]:
    """Every parameter by its name, filled with NaN before it is loaded."""
    decoder = Decoder(load_config(folder), dtype, "cpu", shard=shard)
    parameters = {parameter.name: parameter.tensor.fill_(torch.nan) for parameter in decoder.parameters()}
    load_weights(folder, decoder)
    return parameters


def rewritten(folder: Path, without: tuple[str, ...] = (), **tensors: torch.Tensor) -> Path:
    """The single-file checkpoint in `folder` without some tensors and with others; `__` stands for a dot."""
    content = load_file(folder / SINGLE_FILE)
    content.update({name.replace("__", "."): tensor for name, tensor in tensors.items()})
    write_weights(folder, {name: tensor for name, tensor in content.items() if name not in without})
    return folder


def test_fused_parameters_hold_their_parts_in_order(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3")
    source, parameters = load_file(folder / SINGLE_FILE), loaded(folder)
    attention = "model.layers.1.self_attn."
    fused = torch.cat([source[f"{attention}{name}_proj.weight"] for name in "qkv"])
    assert torch.equal(parameters["layers.1.qkv.weight"], fused)
    q_norm, k_norm = source[f"{attention}q_norm.weight"], source[f"{attention}k_norm.weight"]
    assert torch.equal(parameters["layers.1.qk_norm"], torch.stack([q_norm] * 4 + [k_norm] * 2))


def test_shards_load_like_a_single_file(tmp_path: Path) -> None:
    single = loaded(make_checkpoint(tmp_path / "single", "qwen2"))
    folder = make_checkpoint(tmp_path / "sharded", "qwen2", shard_bytes=60_000)
    assert len(list(folder.glob("*.safetensors"))) > 3
    sharded = loaded(folder)
    assert all(torch.equal(sharded[name], tensor) for name, tensor in single.items())


def test_a_checkpoint_that_transformers_wrote_loads(tmp_path: Path) -> None:
    original = make_checkpoint(tmp_path / "original", "llama", tie=True)
    model = AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32)
    model.save_pretrained(tmp_path / "saved", max_shard_size="60KB")
    assert (tmp_path / "saved" / INDEX_FILE).is_file()
    assert load_config(tmp_path / "saved").rope == load_config(original).rope
    saved, expected = loaded(tmp_path / "saved"), loaded(original)
    assert all(torch.equal(saved[name], tensor) for name, tensor in expected.items())


def test_weights_are_converted_to_the_dtype_of_the_decoder(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "mistral")
    down = loaded(folder, torch.bfloat16)["layers.0.down.weight"]
    source = load_file(folder / SINGLE_FILE)["model.layers.0.mlp.down_proj.weight"]
    assert torch.equal(down, source.to(torch.bfloat16))


def test_matrices_of_several_dtypes_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, name = make_checkpoint(tmp_path, "llama"), "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(folder / SINGLE_FILE)
    write_weights(folder, {**tensors, "model.norm.weight": tensors["model.norm.weight"].bfloat16()})
    loaded(folder)
    assert caplog.text == ""
    write_weights(folder, {**tensors, name: tensors[name].half()})
    loaded(folder)
    assert "matrices of several dtypes, and all are converted to float32" in caplog.text
    assert f"F16 ({name})" in caplog.text


def test_a_parameter_has_no_memory_until_it_is_written(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    decoder = Decoder(load_config(folder), torch.float32, "cpu")
    parameters = list(decoder.parameters())
    num_bytes = sum(parameter.tensor.nbytes for parameter in parameters)
    held: list[int] = []

    def note(done: int, total: int) -> None:
        held.append(sum(parameter.tensor.untyped_storage().nbytes() for parameter in parameters))

    load_weights(folder, decoder, note)
    assert held[0] == 0
    assert held == sorted(held)
    assert held[-1] == num_bytes


def test_progress_counts_every_byte_once(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", shard_bytes=60_000)
    total = sum(tensor.nbytes for path in folder.glob("*.safetensors") for tensor in load_file(path).values())
    reports: list[tuple[int, int]] = []
    decoder = Decoder(load_config(folder), torch.float32, "cpu")
    load_weights(folder, decoder, lambda done, all_bytes: reports.append((done, all_bytes)))
    assert reports[0] == (0, total)
    assert reports[-1] == (total, total)
    assert reports == sorted(reports)


def test_derived_tables_and_an_equal_tied_head_are_ignored(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", tie=True)
    embedding = load_file(folder / SINGLE_FILE)["model.embed_tokens.weight"].clone()
    inv_freq = torch.ones(8)
    loaded(rewritten(folder, lm_head__weight=embedding, model__layers__0__self_attn__rotary_emb__inv_freq=inv_freq))


def test_a_tied_head_that_differs_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", tie=True)
    embedding = load_file(folder / SINGLE_FILE)["model.embed_tokens.weight"]
    with pytest.raises(ModelLoadError, match=r"lm_head\.weight differs .* tie_word_embeddings"):
        loaded(rewritten(folder, lm_head__weight=embedding + 1))


@pytest.mark.parametrize(
    ("without", "tensors", "message"),
    [
        (("model.norm.weight",), {}, r"lacks 1 tensors: model\.norm\.weight$"),
        (
            ("model.layers.1.self_attn.k_proj.weight",),
            {},
            r"layers\.1\.self_attn\.k_proj\.weight; fused parameters left half filled: layers\.1\.qkv\.weight",
        ),
        (("model.layers.0.self_attn.v_proj.bias",), {}, r"self_attn\.v_proj\.bias; .* layers\.0\.qkv\.bias"),
        ((), {"model__layers__2__mlp__up_proj__weight": torch.ones(2, 2)}, r"has 1 tensors .*: model\.layers\.2\.mlp"),
        (
            (),
            {"model__layers__0__mlp__up_proj__bias": torch.ones(2)},
            r"Qwen2ForCausalLM does not use: .*up_proj\.bias",
        ),
        ((), {"model__norm__weight": torch.ones(63)}, r"model\.norm\.weight has shape \[63\], .* makes it \[64\]"),
        ((), {"model__norm__weight": torch.ones(64, dtype=torch.int8)}, r"model\.norm\.weight has dtype I8"),
    ],
)
def test_incomplete_or_surplus_tensors_are_named(
    tmp_path: Path, without: tuple[str, ...], tensors: dict[str, torch.Tensor], message: str
) -> None:
    folder = rewritten(make_checkpoint(tmp_path, "qwen2"), without, **tensors)
    with pytest.raises(ModelLoadError, match=message):
        loaded(folder)


def test_a_folder_without_weights_says_what_was_looked_for(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    (folder / SINGLE_FILE).unlink()
    with pytest.raises(ModelLoadError, match=rf"neither {SINGLE_FILE} nor {INDEX_FILE}"):
        loaded(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", shard_bytes=60_000)
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelLoadError, match=f"missing: {shard.name}"):
        loaded(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not a valid weight index"),
        ("[]", "not a valid weight index"),
        ("{}", "not a valid weight index"),
        ('{"weight_map": {}}', "names no weight file"),
        ('{"weight_map": {"a": 1}}', "1 is not the name of a safetensors file beside it"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "'../x.safetensors' is not the name of a safetensors file"),
    ],
)
def test_a_damaged_index_is_refused(tmp_path: Path, content: str, message: str) -> None:
    folder = make_checkpoint(tmp_path, "llama", shard_bytes=60_000)
    (folder / INDEX_FILE).write_text(content)
    with pytest.raises(ModelLoadError, match=f"{INDEX_FILE}: {message}"):
        loaded(folder)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", shard_bytes=60_000)
    first, second = sorted(folder.glob("*.safetensors"))[:2]
    second.write_bytes(first.read_bytes())
    with pytest.raises(ModelLoadError, match=r"another file has too: .*embed_tokens"):
        loaded(folder)


@pytest.mark.parametrize("num_bytes", [0, 4, 500, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, num_bytes: int) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    path = folder / SINGLE_FILE
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(ModelLoadError, match=SINGLE_FILE):
        loaded(folder)


def entry(**changes: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": [64], "data_offsets": [0, 256], **changes}


@pytest.mark.parametrize(
    "header",
    [
        b"\xff\xff",
        b"[]",
        json.dumps({"a": entry(data_offsets=[0, 512])}).encode(),
        json.dumps({"a": entry(shape="x")}).encode(),
        json.dumps({"a": {"dtype": "F32"}}).encode(),
        json.dumps({"a": 3}).encode(),
    ],
)
def test_a_damaged_header_is_refused(tmp_path: Path, header: bytes) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    (folder / SINGLE_FILE).write_bytes(len(header).to_bytes(8, "little") + header + bytes(256))
    with pytest.raises(ModelLoadError, match=SINGLE_FILE):
        loaded(folder)


def test_offsets_that_overlap_are_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    path = folder / SINGLE_FILE
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header: dict[str, Any] = json.loads(content[8 : 8 + size])
    first, second = "model.norm.weight", "model.layers.0.input_layernorm.weight"
    header[first]["data_offsets"] = header[second]["data_offsets"]
    damaged = json.dumps(header).encode()
    path.write_bytes(len(damaged).to_bytes(8, "little") + damaged + content[8 + size :])
    with pytest.raises(ModelLoadError, match=SINGLE_FILE):
        loaded(folder)


def test_the_digest_tells_weights_apart_and_nothing_else(tmp_path: Path) -> None:
    digest = weights_digest(make_checkpoint(tmp_path / "a", "llama"))
    assert len(digest) == 32
    assert int(digest, 16) >= 0
    assert weights_digest(make_checkpoint(tmp_path / "b", "llama")) == digest
    assert weights_digest(make_checkpoint(tmp_path / "c", "llama", seed=1)) != digest
    assert weights_digest(make_checkpoint(tmp_path / "d", "llama", dtype="bfloat16")) != digest


def test_the_digest_covers_all_of_a_long_header(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", changes={"num_hidden_layers": 12})
    digest = weights_digest(folder)
    path = folder / SINGLE_FILE
    content = bytearray(path.read_bytes())
    header_bytes = int.from_bytes(content[:8], "little")
    assert header_bytes > 8000
    content[header_bytes - 8] ^= 1
    path.write_bytes(content)
    assert weights_digest(folder) != digest


@pytest.mark.parametrize("position", ["first", "last"])
def test_the_digest_sees_the_first_and_the_last_byte(tmp_path: Path, position: str) -> None:
    folder = make_checkpoint(tmp_path, "llama", shard_bytes=60_000)
    digest = weights_digest(folder)
    path = sorted(folder.glob("*.safetensors"))[-1]
    content = bytearray(path.read_bytes())
    data_start = 8 + int.from_bytes(content[:8], "little")
    content[data_start if position == "first" else -1] ^= 1
    path.write_bytes(content)
    assert weights_digest(folder) != digest


def test_config_and_digest_need_no_torch(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    code = (
        "import sys; from pathlib import Path; from baton.engine.models.config import load_config;"
        "from baton.engine.models.checkpoint import resolve_checkpoint;"
        "from baton.engine.models.weight_files import weights_digest;"
        "folder = resolve_checkpoint(sys.argv[1]); load_config(folder); weights_digest(folder);"
        "sys.exit('torch' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, env=environment, timeout=60)


SHARDED = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True}


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_ranks_load_their_rows_and_columns(tmp_path: Path, family: str) -> None:
    folder = make_checkpoint(tmp_path, family, changes=SHARDED if family == "llama" else {})
    source = load_file(folder / SINGLE_FILE)
    head = 32 if family == "qwen3" else 16
    prefix = "model.layers.1."
    for rank in range(2):
        parameters = loaded(folder, shard=Shard(rank, 2))
        assert not any(parameter.isnan().any() for parameter in parameters.values())
        q, kv = slice(rank * 2 * head, (rank + 1) * 2 * head), slice(rank * head, (rank + 1) * head)
        inner = slice(rank * 64, (rank + 1) * 64)
        for ending in ("weight", "bias") if family == "llama" else ("weight",):
            parts = zip("qkv", (q, kv, kv), strict=True)
            fused = torch.cat([source[f"{prefix}self_attn.{name}_proj.{ending}"][rows] for name, rows in parts])
            assert torch.equal(parameters[f"layers.1.qkv.{ending}"], fused)
            gate_up = torch.cat([source[f"{prefix}mlp.{name}_proj.{ending}"][inner] for name in ("gate", "up")])
            assert torch.equal(parameters[f"layers.1.gate_up.{ending}"], gate_up)
        assert torch.equal(parameters["layers.1.o.weight"], source[f"{prefix}self_attn.o_proj.weight"][:, q])
        assert torch.equal(parameters["layers.1.down.weight"], source[f"{prefix}mlp.down_proj.weight"][:, inner])
        assert torch.equal(parameters["head.weight"], source["lm_head.weight"])
        if family == "llama":
            # the ranks' results are added up: one of them has the bias
            assert len(parameters["layers.1.o.bias"]) == (64 if rank == 0 else 0)


def test_a_rank_misses_tensors_that_it_takes_nothing_of(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", changes=SHARDED)
    rewritten(folder, without=("model.layers.0.self_attn.o_proj.bias",))
    with pytest.raises(ModelLoadError, match=r"lacks 1 tensors: model\.layers\.0\.self_attn\.o_proj\.bias"):
        loaded(folder, shard=Shard(1, 2))


def test_a_model_that_cannot_be_divided_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="4 attention heads cannot be divided among 3 ranks"):
        loaded(make_checkpoint(tmp_path, "llama"), shard=Shard(0, 3))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_no_numbers_are_named_at_load(tmp_path: Path, value: float) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    name = "model.layers.1.mlp.down_proj.weight"
    tensor = load_file(folder / SINGLE_FILE)[name].clone()
    tensor[3, 5] = value
    with pytest.raises(ModelLoadError, match=r"NaN or infinite .* in float32 in .* model\.layers\.1\.mlp\.down"):
        loaded(rewritten(folder, **{name.replace(".", "__"): tensor}))


def test_a_matrix_of_zeros_is_named_at_load_though_it_is_fused_with_others(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", changes={"attention_bias": True})
    loaded(rewritten(folder, model__layers__0__self_attn__k_proj__bias=torch.zeros(32)))
    with pytest.raises(ModelLoadError, match=r"layers\.0\.self_attn\.k_proj\.weight has nothing but zeros"):
        loaded(rewritten(folder, model__layers__0__self_attn__k_proj__weight=torch.zeros(32, 64)))


def test_numbers_too_large_for_the_dtype_are_named_at_load(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    norm = torch.full((64,), 1e5)
    with pytest.raises(ModelLoadError, match=r"in float16 in what is loaded from model\.norm\.weight"):
        loaded(rewritten(folder, model__norm__weight=norm), torch.float16)


def test_files_can_be_compared_with_a_config_before_anything_is_allocated(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, "vocab_size": 2**24, "intermediate_size": 2**24}))
    with pytest.raises(
        ModelLoadError, match=r"embed_tokens\.weight has shape \[320, 64\], .* makes it \[16777216, 64\]"
    ):
        check_weights(folder, Decoder(load_config(folder), torch.float32, "meta", TorchOps()))
