"""What engines answer, for comparisons of a quantized model with a plain one that has the numbers it stands for."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from baton.engine.build import build_engine
from baton.engine.models.linear_weights import PlainWeight, QuantizedWeight
from baton.engine.models.quantization.while_loading import quantization_while_loading
from baton.engine.models.weight_files import SINGLE_FILE
from baton.engine.runner.kv_memory import allocate_private
from baton.engine.settings import EngineSettings
from baton.wire.prompt import Prompt
from baton.wire.sampling import DecodingParams
from tests.checkpoints import write_weights
from tests.request_keys import key_of

NUM_OUTPUT = 6
PROMPT = [5, 80, 33, 7, 150, 61, 90, 12, 44, 3, 201, 17]


def answer(folder: Path, **settings: object) -> tuple[list[int], Tensor]:
    """Greedy tokens of a prompt, and the log probabilities of the best three at each place."""
    values = {"num_threads": 1, "num_blocks": 64, "block_size": 4, "max_num_batched_tokens": 8, **settings}
    engine = build_engine(EngineSettings(model=str(folder), **values), allocate_private)  # type: ignore[arg-type]
    engine.core.add(key_of(0), Prompt.of(PROMPT), DecodingParams(temperature=0.0, max_tokens=NUM_OUTPUT, logprobs=3))
    tokens = [token for _ in range(NUM_OUTPUT + 2) for output in engine.core.step() for token in output.tokens]
    engine.device.close()
    logprobs = torch.tensor([token.logprobs.top_logprobs for token in tokens if token.logprobs is not None])
    return [token.token_id for token in tokens], logprobs


def assert_same_answer(folder: Path, reference: Path, tolerance: float = 1e-4, **settings: object) -> None:
    tokens, logprobs = answer(folder, dtype="float32", **settings)
    expected_tokens, expected = answer(reference, dtype="float32", cpu_kernels="torch")
    assert tokens == expected_tokens
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=tolerance)


def matrices_of(folder: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint's products within layers, by their names without ending."""
    tensors = load_file(folder / SINGLE_FILE)
    is_matrix = re.compile(r".*_proj(_with_mqa)?\.weight").fullmatch
    return {name.removesuffix(".weight"): values for name, values in tensors.items() if is_matrix(name)}


def republished(
    folder: Path,
    into: Path,
    change: Callable[[str, Tensor], Mapping[str, Tensor]],
    config: Mapping[str, object] | None = None,
) -> Path:
    """A copy of the checkpoint in `folder` with what `change` makes of each matrix, by its name without ending."""
    shutil.copytree(folder, into)
    tensors = load_file(folder / SINGLE_FILE)
    for name, matrix in matrices_of(folder).items():
        del tensors[f"{name}.weight"]
        tensors |= change(name, matrix)
    write_weights(into, {name: values.contiguous() for name, values in tensors.items()})
    content = json.loads((into / "config.json").read_text())
    (into / "config.json").write_text(json.dumps({**content, **(config or {})}))
    return into


def rounded(matrix: Tensor, setting: str) -> Tensor:
    """The numbers that `--quantization` makes of a matrix."""
    weight = quantization_while_loading(setting).quantized(PlainWeight(matrix))
    assert isinstance(weight, QuantizedWeight)
    return weight.plain(torch.float32)


def dequantized(folder: Path, into: Path, setting: str) -> Path:
    """A plain copy of a checkpoint with a head of its own, with the numbers that `--quantization` makes of it."""
    copy = republished(folder, into, lambda name, matrix: {f"{name}.weight": rounded(matrix, setting)})
    tensors = load_file(copy / SINGLE_FILE)
    write_weights(copy, {**tensors, "lm_head.weight": rounded(tensors["lm_head.weight"], setting)})
    return copy
