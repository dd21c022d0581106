"""An adapter computes what a checkpoint with its changes in the weights computes, for each kind of product that there
is."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from baton.engine.build import build_engine
from baton.engine.models.config import load_config
from baton.engine.models.decoder import Decoder
from baton.engine.models.ops.torch_ops import TorchOps
from baton.engine.models.weight_files import SINGLE_FILE
from baton.engine.runner.kv_memory import allocate_private
from baton.engine.scheduler.step import SampledToken
from baton.engine.settings import EngineSettings
from baton.wire.prompt import Prompt
from baton.wire.sampling import DecodingParams
from tests.engine.models.adapters.adapter_folders import merged, write_adapter
from tests.engine.models.families import VOCAB_SIZE, make_model
from tests.request_keys import key_of

PROMPT = [(11 * place + 5) % VOCAB_SIZE for place in range(21)]
LEFT_OUT: dict[str, set[str]] = {
    "llama": set(),
    "qwen2": set(),
    "phi3": set(),
    "glm": set(),
    "gpt2": set(),
    "gpt-neox": set(),
    "granite": set(),
    "lfm2": {"conv.conv"},
    "qwen3-next": {"mlp.experts", "mlp.gate", "linear_attn.conv1d"},
    "deepseek-v3": {"mlp.experts", "mlp.gate", "self_attn.kv_b_proj"},
}
"""By families, one for each way in which a product is published or fused: matrices that take no adapters."""


def answer(folder: Path, adapter: Path | None = None) -> list[SampledToken]:
    settings = EngineSettings(str(folder), num_threads=1, num_blocks=64, block_size=4, max_num_batched_tokens=8)
    engine = build_engine(settings, allocate_private, adapters={} if adapter is None else {"mine": adapter})
    params = DecodingParams(temperature=0.0, max_tokens=6, logprobs=3)
    engine.core.add(key_of(0), Prompt.of(PROMPT, adapter=engine.adapters.get("mine", b"")), params)
    found = []
    while engine.core.has_work:
        found += [token for output in engine.core.step() for token in output.tokens]
    return found


def _left_out(folder: Path, matrices: Collection[str]) -> set[str]:
    """What of the layers of a checkpoint is a matrix and takes no adapters; of experts their common name."""
    names = [
        name.removesuffix(".weight") for name, values in load_file(folder / SINGLE_FILE).items() if values.dim() > 1
    ]
    found = {name for name in names if re.search(r"\.\d+\.", name) and name not in matrices}
    return {re.sub(r"^.*?\.\d+\.|\.\d+\..*", "", name) for name in found}


@pytest.mark.parametrize("family", LEFT_OUT)
def test_tokens_are_those_of_weights_that_have_the_changes(tmp_path: Path, family: str) -> None:
    base = tmp_path / "base"
    make_model(base, family)
    matrices = Decoder(load_config(base), torch.float32, "meta", TorchOps()).adapters.matrices
    assert _left_out(base, matrices) == LEFT_OUT[family]
    form = {"is_transposed": family == "gpt2"}
    adapter = write_adapter(tmp_path / "adapter", base, matrices, **form)
    found, expected = answer(base, adapter), answer(merged(base, adapter, tmp_path / "merged", **form))
    assert [token.token_id for token in found] == [token.token_id for token in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs is not None
        assert other.logprobs is not None
        assert one.logprobs.top_logprobs == pytest.approx(other.logprobs.top_logprobs, abs=2e-4)
    assert [token.token_id for token in answer(base)] != [token.token_id for token in found]
