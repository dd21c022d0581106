"""Two ranks of one engine, each on a GPU of its own: the tokens of one GPU, in recorded steps too, and the end of one.

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

from device.base import Device
from engine.build import Engine, build_engine
from engine.core import EngineCore
from engine.executor.mp import MpExecutor
from engine.executor.starting import RankFailed
from engine.runner.kv_memory import allocate_private
from engine.settings import EngineSettings
from tests.checkpoints import make_checkpoint
from tests.engine.executor.thread_ranks import built, orders_of
from tests.gpu.conftest import ENGINE_DEVICE, IS_GPU
from tests.gpu.test_graphs import UNDECIDED, generated, leads, make_requests
from tests.request_keys import key_of
from wire.sampling import DecodingParams

END_S = 5.0
NUM_REQUESTS = 12
Build = Callable[..., Engine]


@pytest.fixture
def build(device: Device) -> Iterator[Build]:
    """Engines that end with the test."""
    if IS_GPU and torch.cuda.device_count() < 2:
        pytest.skip("ranks need two CUDA devices, and there is one")
    engines: list[Engine] = []

    def make(folder: Path, num_ranks: int, **more: Any) -> Engine:
        settings = EngineSettings(
            model=str(folder),
            device=ENGINE_DEVICE,
            num_threads=num_ranks,
            num_blocks=256,
            max_model_len=512,
            max_num_seqs=NUM_REQUESTS,
            max_num_batched_tokens=256,
            tensor_parallel_size=num_ranks,
            **more,
        )
        engines.append(build_engine(settings, allocate_private))
        return engines[-1]

    yield make
    for engine in engines:
        engine.executor.close()
        engine.device.close()


def checkpoint(folder: Path) -> Path:
    return make_checkpoint(folder / "model", "qwen3", changes={"head_dim": 64})


def test_ranks_draw_the_tokens_of_one_gpu(build: Build, tmp_path: Path, within: Callable[..., None]) -> None:
    folder, requests = checkpoint(tmp_path), make_requests(NUM_REQUESTS)
    one, two = (generated(build(folder, size, dtype="float32").core, requests) for size in (1, 2))
    within(len(leads(one, two)), 0, unit=f"wrong of {len(requests)}", note="float32", num_cases=len(requests))


def test_ranks_that_share_one_gpu_draw_its_tokens(
    device: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, within: Callable[..., None]
) -> None:
    """Ranks as threads with calls in memory, which no graph records: NCCL does not connect a GPU with itself."""
    folder, requests = checkpoint(tmp_path), make_requests(NUM_REQUESTS)
    common: dict[str, Any] = {"device": ENGINE_DEVICE, "dtype": "float32", "max_num_seqs": NUM_REQUESTS}
    common |= {"num_blocks": 512, "max_num_batched_tokens": 64, "enforce_eager": True, "num_threads": 1}
    alone = build_engine(EngineSettings(str(folder), block_size=4, **common), allocate_private)
    engine, executor = built(monkeypatch, folder, 2, **common)
    parted = leads(generated(alone.core, requests), generated(engine.core, requests))
    executor.close()
    assert any(order.sources for order in orders_of(executor)), "no step was launched ahead"
    within(len(parted), 0, unit=f"wrong of {len(requests)}", note="float32", num_cases=len(requests))


def test_recorded_steps_of_ranks_draw_the_tokens_of_one_gpu_and_a_rank_that_is_killed_ends_them(
    build: Build, tmp_path: Path, within: Callable[..., None]
) -> None:
    folder, requests = checkpoint(tmp_path), make_requests(NUM_REQUESTS)
    engines = [build(folder, size, dtype="bfloat16") for size in (1, 2)]
    found = leads(*(generated(engine.core, requests) for engine in engines))
    wrong = [each for each in found if each >= UNDECIDED]
    note = f"bfloat16; {len(found)} parted where two tokens were as likely"
    within(len(wrong), 0, unit=f"wrong of {len(requests)}", note=note, num_cases=len(requests))
    seconds = _seconds_until_failed(engines[1])
    within(seconds, END_S, unit="s", note="from the end of a rank in a step to the engine's")


def _seconds_until_failed(engine: Engine) -> float:
    assert isinstance(engine.executor, MpExecutor)
    (pid,) = engine.executor.pids
    engine.core.add(key_of(999), [5, 6, 7], DecodingParams(temperature=0.0, max_tokens=400, ignore_eos=True))
    for _ in range(5):
        engine.core.step()
    begin_s = time.monotonic()
    psutil.Process(pid).kill()
    with pytest.raises(RankFailed, match=r"^rank 1 of 2 was killed by SIGKILL$"):
        _finish(engine.core)
    return time.monotonic() - begin_s


def _finish(core: EngineCore) -> None:
    while core.has_work:
        core.step()
