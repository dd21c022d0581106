"""Two ranks of one engine, each on a GPU of its own, as one stage and as two: the tokens of one GPU, in recorded steps
too, and the end of one.

On the host's cores the devices are emulated ones, and gloo takes the place of NCCL.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from baton.device.base import Device
from baton.engine.build import Engine
from baton.engine.core import EngineCore
from baton.ranks.executor.mp import MpExecutor
from baton.ranks.executor.starting import RankFailed
from baton.wire.prompt import Prompt
from baton.wire.sampling import DecodingParams
from tests.checkpoints import make_checkpoint
from tests.gpu import answers
from tests.gpu.answers import generated, make_requests, require_same
from tests.gpu.conftest import ENGINE_DEVICE, IS_GPU
from tests.ranks.executor.thread_ranks import built, orders_of
from tests.request_keys import key_of

END_S = 5.0
NUM_REQUESTS = 12
Build = Callable[..., Engine]


@pytest.fixture
def build(device: Device) -> Iterator[Build]:
    """Engines that end with the test."""
    if IS_GPU and torch.cuda.device_count() < 2:
        pytest.skip("ranks need two CUDA devices, and there is one")
    engines: list[Engine] = []

    def make(folder: Path, size: int, num_stages: int, dtype: str) -> Engine:
        sizes = {"tensor_parallel_size": size, "pipeline_parallel_size": num_stages, "num_threads": size * num_stages}
        engines.append(answers.build(folder, **sizes, dtype=dtype, num_blocks=256, max_num_seqs=NUM_REQUESTS))
        return engines[-1]

    yield make
    for engine in engines:
        engine.executor.close()
        engine.device.close()


def checkpoint(folder: Path) -> Path:
    return make_checkpoint(folder / "model", "qwen3", changes={"head_dim": 64})


def test_ranks_draw_the_tokens_of_one_gpu(build: Build, tmp_path: Path, within: Callable[..., None]) -> None:
    folder, requests = checkpoint(tmp_path), make_requests(NUM_REQUESTS)
    one, two = (generated(build(folder, size, 1, "float32").core, requests) for size in (1, 2))
    assert not require_same(within, one, two, "float32")


def test_ranks_that_share_one_gpu_draw_its_tokens(device: Device, tmp_path: Path, within: Callable[..., None]) -> None:
    """Ranks as threads with calls in memory, which no graph records: NCCL does not connect a GPU with itself."""
    folder, requests = checkpoint(tmp_path), make_requests(NUM_REQUESTS)
    common: dict[str, Any] = {"dtype": "float32", "max_num_seqs": NUM_REQUESTS, "num_blocks": 512}
    common |= {"enforce_eager": True, "num_threads": 1, "block_size": 4, "max_num_batched_tokens": 64}
    alone = answers.build(folder, **common)
    engine, executor = built(folder, 2, device=ENGINE_DEVICE, **common)
    expected, found = generated(alone.core, requests), generated(engine.core, requests)
    executor.close()
    assert any(order.sources for order in orders_of(executor)), "no step was launched ahead"
    assert not require_same(within, expected, found, "float32")


def test_recorded_steps_of_ranks_and_stages_draw_the_tokens_of_one_gpu_and_a_rank_that_is_killed_ends_them(
    build: Build, tmp_path: Path, within: Callable[..., None]
) -> None:
    folder, requests = checkpoint(tmp_path), make_requests(NUM_REQUESTS)
    expected = generated(build(folder, 1, 1, "bfloat16").core, requests)
    for sizes, name in (((2, 1), "rank 1 of 2"), ((1, 2), r"rank 1 of 2 \(stage 0 of 2\)")):
        engine = build(folder, *sizes, "bfloat16")
        require_same(within, expected, generated(engine.core, requests), f"bfloat16, {name}")
        seconds = _seconds_until_failed(engine, name)
        within(seconds, END_S, unit="s", note="from the end of a rank in a step to the engine's")


def _seconds_until_failed(engine: Engine, name: str) -> float:
    assert isinstance(engine.executor, MpExecutor)
    (pid,) = engine.executor.pids
    engine.core.add(key_of(999), Prompt.of([5, 6, 7]), DecodingParams(temperature=0.0, max_tokens=400, ignore_eos=True))
    for _ in range(5):
        engine.core.step()
    begin_s = time.monotonic()
    psutil.Process(pid).kill()
    with pytest.raises(RankFailed, match=f"^{name} was killed by SIGKILL$"):
        _finish(engine.core)
    return time.monotonic() - begin_s


def _finish(core: EngineCore) -> None:
    while core.has_work:
        core.step()
