"""`python -m tests.peers.files --model FOLDER --files FOLDER`: the files of a model that other engines read.

    python -m tests.peers.files --model qwen3-0.6b --files files --bf16-gguf qwen3-0.6b.gguf \
        --llama-cpp llama.cpp/build/bin --openvino OPENVINO/bin/python --vllm

They go to FILES/NAME, NAME being that of the model's folder. Quantizing uses no data: no importance matrix, no
calibration. The .gguf is what llama.cpp's `convert_hf_to_gguf.py` makes; `--openvino` needs openvino, optimum-intel and
nncf; vLLM's checkpoints are written here in the form of compressed-tensors. What is there already is not made again.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from tests.engine.models.quantization.answers import republished
from tests.engine.models.quantization.test_published import compressed, rounded, words

_GGUF = ("Q4_0", "Q4_K_M", "Q8_0")
_OPENVINO: Mapping[str, Sequence[str]] = {
    "openvino-int8": ("--weight-format", "int8"),
    "openvino-int4-sym128": ("--weight-format", "int4", "--sym", "--group-size", "128", "--ratio", "1.0"),
    "openvino-int4-asym32": ("--weight-format", "int4", "--group-size", "32", "--ratio", "1.0"),
}
_GROUP_SIZE = 128
_TOKEN_INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def write_gguf(source: Path, into: Path, programs: Path) -> None:
    """Quantize by llama.cpp. A tokenizer is laid beside the files, because Baton reads them too."""
    for kind in _GGUF:
        if not (into / f"{kind}.gguf").exists():
            subprocess.run([programs / "llama-quantize", source, into / f"{kind}.gguf", kind, "2"], check=True)
    (into / "bf16.gguf").unlink(missing_ok=True)
    (into / "bf16.gguf").symlink_to(source.resolve())


def write_openvino(model: Path, into: Path, python: str) -> None:
    """Convert and compress by Intel's tools, with the weights of all products in the same format."""
    export = [python, "-m", "optimum.commands.optimum_cli", "export", "openvino", "--model", str(model)]
    for name, flags in _OPENVINO.items():
        if not (into / name).exists():
            partial = into / f"{name}.partial"
            subprocess.run([*export, "--task", "text-generation-with-past", *flags, str(partial)], check=True)
            partial.rename(into / name)


def w8(name: str, matrix: Tensor) -> dict[str, Tensor]:
    """A scale for each output; activations get theirs while they are computed."""
    codes, scales, _ = rounded(matrix.float(), 8, matrix.shape[1], is_symmetric=True)
    return {f"{name}.weight": (codes - 128).to(torch.int8), f"{name}.weight_scale": scales.float()}


def w4(name: str, matrix: Tensor) -> dict[str, Tensor]:
    """A scale for each group of inputs."""
    codes, scales, _ = rounded(matrix.float(), 4, _GROUP_SIZE, is_symmetric=True)
    shape = torch.tensor(matrix.shape)
    return {
        f"{name}.weight_packed": words(codes, 4),
        f"{name}.weight_scale": scales.bfloat16(),
        f"{name}.weight_shape": shape,
    }


def write_vllm(model: Path, into: Path) -> None:
    """Two checkpoints of compressed-tensors. Heads and embeddings stay in bfloat16."""
    int8 = compressed("int-quantized", strategy="channel", symmetric=True)
    int8["config_groups"]["group_0"]["input_activations"] = _TOKEN_INT8
    int4 = compressed("pack-quantized", num_bits=4, strategy="group", group_size=_GROUP_SIZE, symmetric=True)
    kinds: Mapping[str, tuple[Callable[[str, Tensor], Mapping[str, Tensor]], Mapping[str, object]]] = {
        "vllm-w8a8": (w8, int8),
        "vllm-w4": (w4, int4),
    }
    for name, (change, config) in kinds.items():
        if not (into / name).exists():
            made = republished(model, into / name, change, {"quantization_config": config})
            for file in made.glob("*.gguf"):  # the copy of one that lies beside the checkpoint
                file.unlink()


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m tests.peers.files", description=__doc__, formatter_class=form)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--files", type=Path, required=True)
    parser.add_argument("--bf16-gguf", type=Path, metavar="FILE", help="the model as llama.cpp reads it")
    parser.add_argument("--llama-cpp", type=Path, metavar="FOLDER", help="of llama.cpp's programs")
    parser.add_argument("--openvino", default="", metavar="PYTHON")
    parser.add_argument("--vllm", action="store_true")
    flags = parser.parse_args()
    into = flags.files / flags.model.name
    into.mkdir(parents=True, exist_ok=True)
    for name in _TOKENIZER:
        shutil.copy(flags.model / name, into)
    if flags.bf16_gguf and flags.llama_cpp:
        write_gguf(flags.bf16_gguf, into, flags.llama_cpp)
    if flags.openvino:
        write_openvino(flags.model, into, flags.openvino)
    if flags.vllm:
        write_vllm(flags.model, into)
    sys.stdout.write(f"{into}: {', '.join(sorted(path.name for path in into.iterdir()))}\n")


if __name__ == "__main__":
    main()
