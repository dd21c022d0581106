"""Checkpoints of the published methods, made here as the formats say, against plain ones with the numbers in them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.engine.models.config import load_config
from baton.engine.models.decoder import Decoder
from baton.engine.models.loading import check_weights
from baton.engine.models.ops.torch_ops import TorchOps
from baton.engine.models.parameters import slices
from baton.engine.models.parts.base import PartSetup
from baton.engine.models.parts.linear import Linear, Matrix
from baton.engine.models.quantization.base import Quantization
from baton.engine.models.quantization.choose import choose_quantization
from baton.engine.models.quantization.while_loading import AUTO
from baton.engine.models.shard import Shard
from baton.engine.models.weight_files import SINGLE_FILE
from baton.wire.errors import InvalidSetting, ModelLoadError
from tests.checkpoints import make_checkpoint
from tests.engine.models.families import FAMILIES, make_model
from tests.engine.models.quantization.answers import assert_same_answer, republished
from tests.engine.models.test_families import built

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Made:
    """A matrix as a method publishes it, and the numbers that it stands for."""

    tensors: Mapping[str, Tensor]
    meaning: Tensor


def words(codes: Tensor, bits: int) -> Tensor:
    """[rows, columns / per word] int32, the first column in the lowest bits."""
    per_word = 32 // bits
    wide = codes.to(torch.int64).view(len(codes), -1, per_word)
    packed = sum(wide[:, :, place] << (bits * place) for place in range(per_word))
    assert isinstance(packed, Tensor)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


def rounded(matrix: Tensor, bits: int, group_size: int, *, is_symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Unsigned codes [out, in], scales and zero points [out, groups]."""
    grouped = matrix.view(len(matrix), -1, group_size)
    top = 2**bits - 1
    low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
    if is_symmetric:
        scales = (grouped.abs().amax(2) / (top // 2)).half().float()
        zeros = torch.full_like(scales, top // 2 + 1)
    else:
        scales = ((high - low) / top).half().float()
        zeros = (-low / scales).round().clamp(1, top)
    codes = (grouped / scales[:, :, None] + zeros[:, :, None]).round().clamp(0, top)
    return codes.view(matrix.shape), scales, zeros


def meaning_of(codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    grouped = codes.view(len(codes), scales.shape[1], -1)
    return ((grouped - zeros[:, :, None]) * scales[:, :, None]).view(codes.shape)


def gptq(matrix: Tensor, bits: int = 4, *, is_first: bool = True, acts: bool = False) -> Made:
    group_size = 32
    order = torch.arange(matrix.shape[1])
    if acts:
        order = torch.randperm(matrix.shape[1], generator=torch.Generator().manual_seed(3))
    # inputs order[i] are in group i // 32
    codes, scales, zeros = rounded(matrix[:, order].contiguous(), bits, group_size, is_symmetric=False)
    back = order.argsort()
    meaning = meaning_of(codes, scales, zeros)[:, back]
    tensors = {
        "qweight": words(codes[:, back], bits).T,
        "qzeros": words((zeros - 1 if is_first else zeros).T, bits),
        "scales": scales.T.half(),
        "g_idx": (back // group_size).to(torch.int32),
    }
    return Made(tensors, meaning)


def awq(matrix: Tensor) -> Made:
    codes, scales, zeros = rounded(matrix, 4, 32, is_symmetric=False)

    def packed(numbers: Tensor) -> Tensor:
        return words(numbers.reshape(len(numbers), -1, 8)[:, :, list(AWQ_COLUMNS)].flatten(1), 4)

    tensors = {"qweight": packed(codes.T), "qzeros": packed(zeros.T), "scales": scales.T.half()}
    return Made(tensors, meaning_of(codes, scales, zeros))


def packed(matrix: Tensor, bits: int = 4, *, is_symmetric: bool = True) -> Made:
    codes, scales, zeros = rounded(matrix, bits, 32, is_symmetric=is_symmetric)
    tensors = {
        "weight_packed": words(codes, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(matrix.shape),
    }
    if not is_symmetric:
        tensors["weight_zero_point"] = words(zeros.T, bits).T
    return Made(tensors, meaning_of(codes, scales, zeros))


def int8(matrix: Tensor) -> Made:
    codes, scales, zeros = rounded(matrix, 8, matrix.shape[1], is_symmetric=True)
    tensors = {"weight": (codes - 128).to(torch.int8), "weight_scale": scales.bfloat16()}
    return Made(tensors, meaning_of(codes, scales.bfloat16().float(), zeros))


def fp8(matrix: Tensor, block: tuple[int, int], scale: str) -> Made:
    """`block` (0, 0): one scale for all."""
    rows, columns = (size or whole for size, whole in zip(block, matrix.shape, strict=True))
    found = torch.empty(-(-len(matrix) // rows), -(-matrix.shape[1] // columns))
    wide = torch.empty_like(matrix)
    for row in range(found.shape[0]):
        for column in range(found.shape[1]):
            part = (slice(row * rows, (row + 1) * rows), slice(column * columns, (column + 1) * columns))
            found[row, column] = matrix[part].abs().max() / 448
            wide[part] = found[row, column]
    codes = (matrix / wide).to(torch.float8_e4m3fn)
    return Made({"weight": codes, scale: found if any(block) else found.reshape(())}, codes.float() * wide)


def compressed(kind: str, **weights: object) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", **weights}, "input_activations": None}
    config = {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": group}}
    return {**config, "quantization_status": "compressed", "ignore": ["lm_head"]}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
METHODS: Mapping[str, tuple[Callable[[Tensor], Made], Mapping[str, Any]]] = {
    "gptq": (gptq, GPTQ),
    "gptq-act-order": (lambda matrix: gptq(matrix, acts=True), {**GPTQ, "desc_act": True}),
    "gptq-v2": (lambda matrix: gptq(matrix, is_first=False), {**GPTQ, "checkpoint_format": "gptq_v2"}),
    "gptq-8": (lambda matrix: gptq(matrix, 8), {**GPTQ, "bits": 8}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}),
    "w4a16": (packed, compressed("pack-quantized", num_bits=4, strategy="group", group_size=32)),
    "w4a16-zeros": (
        lambda matrix: packed(matrix, is_symmetric=False),
        compressed("pack-quantized", num_bits=4, strategy="group", group_size=32, symmetric=False),
    ),
    "w8a8": (int8, compressed("int-quantized", strategy="channel")),
    "fp8-channel": (
        lambda matrix: fp8(matrix, (1, 0), "weight_scale"),
        compressed("float-quantized", type="float", strategy="channel"),
    ),
    "fp8-tensor": (lambda matrix: fp8(matrix, (0, 0), "weight_scale"), {"quant_method": "fp8"}),
    "fp8-blocks": (
        lambda matrix: fp8(matrix, (128, 128), "weight_scale_inv"),
        {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3", "activation_scheme": "dynamic"},
    ),
}


def published(tmp_path: Path, method: str, **config: object) -> tuple[Path, Path]:
    """A checkpoint of the method, and a plain one of the numbers in it."""
    make, settings = METHODS[method]
    # sizes that blocks of 128 do not divide
    plain = make_checkpoint(tmp_path / "plain", "qwen3", changes={"hidden_size": 160, "intermediate_size": 192})

    def parts(name: str, matrix: Tensor) -> dict[str, Tensor]:
        return {f"{name}.{ending}": values for ending, values in make(matrix.float()).tensors.items()}

    folder = republished(plain, tmp_path / "quantized", parts, {"quantization_config": {**settings, **config}})
    reference = republished(
        plain, tmp_path / "reference", lambda name, matrix: {f"{name}.weight": make(matrix.float()).meaning}
    )
    return folder, reference


@pytest.mark.parametrize("method", METHODS)
def test_answers_are_those_of_the_numbers_in_the_files(tmp_path: Path, method: str) -> None:
    folder, reference = published(tmp_path, method)
    for kernels in ("auto", "torch"):
        assert_same_answer(folder, reference, 3e-4, cpu_kernels=kernels)


@pytest.mark.parametrize(
    ("family", "method"),
    [("deepseek-v3", "fp8-blocks"), ("qwen3-moe", "gptq"), ("qwen2-moe", "w8a8")],
)
def test_experts_and_latents_may_be_quantized(tmp_path: Path, family: str, method: str) -> None:
    model_type, changes = FAMILIES[family]
    make_model(tmp_path / "plain", (model_type, {**changes, "vocab_size": 256, "moe_intermediate_size": 64}))
    make, settings = METHODS[method]

    def parts(name: str, matrix: Tensor) -> dict[str, Tensor]:
        return {f"{name}.{ending}": values for ending, values in make(matrix).tensors.items()}

    config = {"quantization_config": settings}
    folder = republished(tmp_path / "plain", tmp_path / "quantized", parts, config)
    reference = republished(
        tmp_path / "plain", tmp_path / "reference", lambda name, matrix: {f"{name}.weight": make(matrix).meaning}
    )
    assert_same_answer(folder, reference, 3e-4)


@pytest.mark.parametrize("method", ["gptq", "awq", "w4a16-zeros", "w8a8", "fp8-blocks"])
def test_ranks_have_their_shares(tmp_path: Path, method: str) -> None:
    folder, _ = published(tmp_path, method)
    config = load_config(folder)
    quantization = choose_quantization("auto", config, folder)
    for rank in range(2):
        decoder = Decoder(config, torch.float32, "meta", TorchOps(), Shard(rank, 2), quantization=quantization)
        assert all(parameter.is_covered for parameter in decoder.parameters())
    adds_up(folder, quantization)


@torch.inference_mode()
def adds_up(folder: Path, quantization: Quantization) -> None:
    """The shares of a row-parallel product, and those of a column-parallel one side by side."""
    config = load_config(folder)
    x = torch.randn(3, config.intermediate_size, generator=torch.Generator().manual_seed(0))
    tensors = load_file(folder / SINGLE_FILE)
    found = []
    for shard in (Shard(), Shard(0, 2), Shard(1, 2)):
        setup = PartSetup(torch.float32, torch.device("cpu"), TorchOps(), shard, quantization=quantization)
        share = shard.share_of(config.intermediate_size, "rows")
        mlp = "model.layers.0.mlp"
        down = Linear.row_parallel("d", f"{mlp}.down_proj", 160, len(x[0]), share, False, setup)
        up = Linear.column_parallel("u", [Matrix(f"{mlp}.up_proj", len(x[0]), share)], 160, False, setup)
        for linear in (down, up):
            for parameter in linear.parameters():
                for source in parameter.sources:
                    parameter.tensor.copy_(tensors[source.name][slices(source.taken)])
            linear.pack()
        found.append((down(x[:, share.start : share.stop]), up(x[:, :160])))
    whole, first, second = found
    torch.testing.assert_close(whole[0], first[0] + second[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(whole[1], torch.cat((first[1], second[1]), dim=1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", ["w8a8", "fp8-tensor"])
def test_scales_of_a_whole_kv_cache_are_not_needed(
    tmp_path: Path, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder, _ = published(tmp_path, method, kv_cache_scheme={"num_bits": 8, "type": "float", "strategy": "tensor"})
    file = folder / SINGLE_FILE
    scales = {f"model.layers.{layer}.self_attn.{part}_scale": torch.tensor(0.5) for layer in (0, 1) for part in "kv"}
    save_file({**load_file(file), **scales}, file)
    with caplog.at_level(logging.INFO):
        check(folder)
    assert "scales for KV in 8 bits, which are not needed" in caplog.text
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]["kv_cache_scheme"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="4 tensors that Qwen3ForCausalLM does not use"):
        check(folder)


def check(folder: Path) -> None:
    config = load_config(folder)
    quantization = choose_quantization("auto", config, folder)
    check_weights(folder, Decoder(config, torch.float32, "meta", TorchOps(), quantization=quantization))


@pytest.mark.parametrize(
    ("method", "changes", "reason"),
    [
        ("gptq", {"bits": 3}, r"quantization_config.bits must be 4 or 8, got 3"),
        ("gptq", {"group_size": 64}, r"groups of 64 do not divide its 160 inputs"),
        ("gptq", {"group_size": "all"}, r"group_size must be -1, or at least 16, got 'all'"),
        ("gptq", {"dynamic": {"-:.*": {}}}, r"quantization_config.dynamic must be None or \{\}"),
        ("awq", {"version": "gemv"}, r"quantization_config.version must be 'gemm' or 'GEMM', got 'gemv'"),
        ("fp8-blocks", {"weight_block_size": [64, 64]}, r"weight_block_size must be \[128, 128\]"),
        (
            "w8a8",
            {"quant_method": "bitsandbytes"},
            r"'bitsandbytes'\) is not supported; .*; --quantization int4 or int8",
        ),
        ("w4a16", {"format": "nvfp4-pack-quantized"}, r"quantization_config.format must be 'pack-quantized' or"),
    ],
)
def test_what_is_not_supported_is_said_by_name(
    tmp_path: Path, method: str, changes: dict[str, object], reason: str
) -> None:
    folder, _ = published(tmp_path, method, **changes)
    with pytest.raises(ModelLoadError, match=reason):
        check(folder)


@pytest.mark.parametrize(
    ("method", "lacking"), [("gptq", "scales"), ("awq", "qzeros"), ("w8a8", "weight_scale"), ("w4a16", "weight_shape")]
)
def test_missing_scales_are_said_by_name(tmp_path: Path, method: str, lacking: str) -> None:
    folder, _ = published(tmp_path, method)

    def without(name: str, matrix: Tensor) -> dict[str, Tensor]:
        made = METHODS[method][0](matrix.float()).tensors
        return {f"{name}.{ending}": values for ending, values in made.items() if ending != lacking}

    settings = {"quantization_config": METHODS[method][1]}
    lame = republished(tmp_path / "plain", tmp_path / "lame", without, settings)
    with pytest.raises(ModelLoadError, match=rf"lacks model.layers.0.self_attn.q_proj.{lacking}"):
        check(lame)
    assert folder != lame


@pytest.mark.parametrize(
    ("method", "ending", "change", "reason"),
    [
        ("fp8-tensor", "weight_scale", torch.zeros_like, "has nothing but zeros"),
        ("fp8-tensor", "weight_scale", lambda scale: scale.to(torch.int32), "has dtype I32, which is not supported"),
        ("gptq", "qweight", lambda codes: codes.to(torch.float32), "has dtype F32, which is not supported"),
    ],
)
def test_wrong_scales_and_codes_are_said_by_name(
    tmp_path: Path, method: str, ending: str, change: Callable[[Tensor], Tensor], reason: str
) -> None:
    folder, _ = published(tmp_path, method)
    name = f"model.layers.0.self_attn.q_proj.{ending}"
    tensors = load_file(folder / SINGLE_FILE)
    save_file({**tensors, name: change(tensors[name])}, folder / SINGLE_FILE)
    with pytest.raises(ModelLoadError, match=f"{name} {reason}"):
        built(folder)


def test_a_quantized_checkpoint_is_not_quantized_again(tmp_path: Path) -> None:
    folder, reference = published(tmp_path, "awq")
    with pytest.raises(InvalidSetting, match=r"--quantization int4: the checkpoint is quantized already \(awq\)"):
        assert_same_answer(folder, reference, quantization="int4")


@pytest.mark.parametrize("method", ["gptq", "w4a16", "fp8-tensor"])
def test_plain_weights_that_the_config_calls_quantized_are_refused(tmp_path: Path, method: str) -> None:
    folder = make_checkpoint(tmp_path, "qwen3")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": METHODS[method][1]}))
    with pytest.raises(ModelLoadError, match="no weight is stored so"):
        choose_quantization(AUTO, load_config(folder), folder)
