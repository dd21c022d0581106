from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baton.engine.build import build_engine
from baton.engine.core import EngineCore
from baton.engine.runner.kv_memory import KvMemory, allocate_private
from baton.engine.scheduler.step import Step
from baton.engine.settings import EngineSettings
from baton.wire.prompt import Prompt
from baton.wire.sampling import DecodingParams
from tests.checkpoints import make_checkpoint
from tests.request_keys import A


@pytest.fixture
def engine(tmp_path: Path) -> tuple[EngineCore, KvMemory]:
    folder = make_checkpoint(tmp_path / "llama", "llama")
    built = build_engine(EngineSettings(model=str(folder), num_threads=1, num_blocks=16), allocate_private)
    return built.core, built.memory


def test_a_layer_is_told_of_when_its_kv_will_not_change_any_more(engine: tuple[EngineCore, KvMemory]) -> None:
    core, memory = engine
    core.add(A, Prompt.of(list(range(3, 30))), DecodingParams(temperature=0.0, max_tokens=1), first_token_only=True)
    seen: list[torch.Tensor] = []
    tables: list[list[int]] = []

    def watch(step: Step) -> object:
        tables.append(list(step.requests[0].block_table))
        return lambda: seen.append(memory.paged.blocks[tables[0]].clone())

    core.step(watch)  # type: ignore[arg-type]
    num_layers = memory.layout.num_layers
    assert len(seen) == num_layers
    final = memory.paged.blocks[tables[0]]
    for layer, end in enumerate(memory.layout.layer_ends):
        end //= final.element_size()
        assert torch.equal(seen[layer][:, :end], final[:, :end])
        assert memory.paged.layer(layer)[tables[0]].abs().sum() > 0


def test_a_step_can_run_without_a_watch(engine: tuple[EngineCore, KvMemory]) -> None:
    core, _ = engine
    core.add(A, Prompt.of([5, 6, 7]), DecodingParams(temperature=0.0, max_tokens=2))
    assert core.step()[0].tokens
