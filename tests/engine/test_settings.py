"""An engine with each number of its settings at its least and its most answers a request, or one line says why not."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.build import build_engine
from baton.engine.runner.kv_memory import allocate_private, allocate_shared
from baton.engine.settings import EngineSettings
from baton.ranks.executor.choose import open_executor
from baton.wire.errors import InvalidSetting
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams
from tests.checkpoints import make_checkpoint

NUMBERS = {field.name: field for field in dataclasses.fields(EngineSettings) if type(field.default) in (int, float)}
REFUSED = {
    ("kv_cache_memory_bytes", "most"): "needs .* GiB, and .* are free",
    ("kv_offloading_size", "most"): "needs as many GiB beside the KV pool",
    ("kv_disk_size", "most"): "needs a folder: --kv-disk PATH",
    ("cpu_memory_utilization", "least"): "leaves nothing for KV",
    ("max_model_len", "most"): "above the model's limit of 512",
    ("num_blocks", "most"): "needs .* GiB, and .* are free",
    ("tensor_parallel_size", "most"): "4 attention heads cannot be divided",
    ("pipeline_parallel_size", "most"): "2 layers cannot be divided",
    ("rank_machines", "most"): "1 ranks cannot be spread",
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "qwen3", "qwen3")


def answered(settings: EngineSettings) -> None:
    """Compute what a node does before its first request, and a request."""
    allocate = allocate_shared if settings.num_ranks > 1 else allocate_private
    engine = build_engine(settings, allocate, open_executor=open_executor)
    try:
        engine.learn_costs()
        prompt = [5] * min(5, engine.max_request_tokens - 1)
        engine.core.add(
            RequestKey.numbered(1), Prompt.of(prompt), DecodingParams(temperature=0, max_tokens=3, ignore_eos=True)
        )
        while engine.core.has_work:
            engine.core.step()
        assert engine.core.status().cost is not None
    finally:
        engine.executor.close()
        engine.device.close()
        torch.set_num_threads(1)


@pytest.mark.parametrize("end", ["least", "most"])
@pytest.mark.parametrize("name", NUMBERS)
def test_the_ends_of_what_a_number_may_be_work_or_are_refused(name: str, end: str, checkpoint: Path) -> None:
    allowed = NUMBERS[name].metadata["allowed"]
    value = 1e-6 if end == "least" and allowed.excludes_least else getattr(allowed, end)
    kind: Any = type(NUMBERS[name].default)
    changes: dict[str, Any] = {"num_threads": 1, name: kind(value)}
    settings = EngineSettings(model=str(checkpoint), **changes)
    if (name, end) in REFUSED:
        with pytest.raises(InvalidSetting, match=REFUSED[name, end]) as caught:
            build_engine(settings, allocate_private, open_executor=open_executor)
        assert "\n" not in str(caught.value)
    else:
        answered(settings)


@pytest.mark.parametrize(
    "changes",
    [
        *({"max_model_len": length} for length in (2, 3, 16, 17, 255, 256, 257)),
        *({"max_num_batched_tokens": count} for count in (1, 2)),
        {"num_blocks": 2},
        {"block_size": 1, "num_blocks": 2},
        {"block_size": 1, "max_model_len": 2, "max_num_seqs": 1, "max_num_batched_tokens": 1},
        {"block_size": 4096, "max_model_len": 2},
    ],
    ids=str,
)
def test_a_small_engine_answers(changes: dict[str, Any], checkpoint: Path) -> None:
    answered(EngineSettings(model=str(checkpoint), num_threads=1, **changes))


@pytest.mark.parametrize(("name", "value"), [("max_num_seqs", 0), ("block_size", -1), ("cpu_memory_utilization", 2.0)])
def test_settings_that_no_flag_gave_are_checked(name: str, value: float, checkpoint: Path) -> None:
    with pytest.raises(InvalidSetting, match=f"^--{name.replace('_', '-')}: {value} is not "):
        build_engine(EngineSettings(model=str(checkpoint), **{name: value}), allocate_private)  # type: ignore[arg-type]
