"""Steps that several ranks compute together: the tokens of one rank, over one KV memory, and what each is told."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest

from baton.device.base import STEP_TIMEOUT_S
from baton.engine.attention.base import LayerStored
from baton.engine.build import Engine, build_engine
from baton.engine.first_costs import measure_first_costs
from baton.engine.models.config import load_config
from baton.engine.models.division import require_divisible
from baton.engine.runner.kv_memory import allocate_private
from baton.engine.scheduler.reading import RowsRead
from baton.engine.scheduler.step import RequestOutput, Step
from baton.engine.settings import OWN, SHARED, EngineSettings
from baton.ranks.executor.choose import open_executor
from baton.ranks.executor.leading import LEAST_S
from baton.wire.errors import InvalidSetting, ModelLoadError
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams
from tests.checkpoints import make_checkpoint
from tests.engine.mean_reading import MeanOfRows
from tests.engine.models.families import VOCAB_SIZE, make_model
from tests.ranks.executor.thread_ranks import built
from tests.request_keys import key_of

GREEDY = DecodingParams(temperature=0.0, max_tokens=6, logprobs=2)
SEEDED = DecodingParams(temperature=0.9, seed=5, max_tokens=6)


def alone(folder: Path, **settings: object) -> Engine:
    values = {"num_threads": 1, "num_blocks": 64, "block_size": 4, "max_num_batched_tokens": 8, **settings}
    chosen = EngineSettings(str(folder), **values)  # type: ignore[arg-type]
    return build_engine(chosen, allocate_private, open_executor=open_executor)


def prompt(length: int, first: int = 3) -> list[int]:
    return [(first + 7 * place) % (VOCAB_SIZE - 3) for place in range(length)]


def outputs_of(engine: Engine, watch: Callable[[Step], LayerStored | None] | None = None) -> list[RequestOutput]:
    """Step until nothing is left."""
    found: list[RequestOutput] = []
    while engine.core.has_work:
        found += engine.core.step() if watch is None else engine.core.step(watch)
        engine.core.check()
    return found


def tokens_in(outputs: Iterable[RequestOutput]) -> dict[RequestKey, list[int]]:
    """Those of each request."""
    found: dict[RequestKey, list[int]] = {}
    for output in outputs:
        assert not output.has_failed, output.failure
        if output.tokens:
            found.setdefault(output.key, []).extend(output.token_ids)
    return found


def tokens(engine: Engine, watch: Callable[[Step], LayerStored | None] | None = None) -> dict[RequestKey, list[int]]:
    """Step until nothing is left."""
    return tokens_in(outputs_of(engine, watch))


def answers(engine: Engine) -> dict[RequestKey, list[int]]:
    """Chunks, prefix hits, forks that copy a block, penalties and noise."""
    core = engine.core
    core.add(key_of(1), Prompt.of(prompt(21)), GREEDY)
    core.add(key_of(2), Prompt.of(prompt(6, first=9)), SEEDED, forks=[key_of(3)])
    found = tokens(engine)
    core.add(
        key_of(4), Prompt.of([*prompt(16), 5, 6]), DecodingParams(temperature=0.0, max_tokens=4, repetition_penalty=1.3)
    )
    return found | tokens(engine)


@pytest.mark.parametrize(
    ("size", "num_stages", "pools"),
    [(2, 1, SHARED), (4, 1, SHARED), (1, 2, SHARED), (2, 3, SHARED), (4, 1, OWN), (2, 3, OWN)],
)
def test_ranks_give_the_tokens_of_one_rank(tmp_path: Path, size: int, num_stages: int, pools: str) -> None:
    make_checkpoint(tmp_path, "qwen3", tie=size == 4 or num_stages == 3, changes={"num_hidden_layers": 4})
    engine, executor = built(tmp_path, size, num_stages, rank_pools=pools)
    assert answers(engine) == answers(alone(tmp_path))
    # what travels is plain and small: a step of 8 tokens names its tokens and its blocks
    assert max(map(len, executor.orders)) < 400
    # chunks of a prompt are in all stages at once
    assert executor.most_in_flight == (num_stages if num_stages > 1 else 0)
    executor.close()


@pytest.mark.parametrize(
    ("kernels", "sizes", "pools"),
    [
        ("auto", (2, 1), SHARED),
        ("torch", (2, 1), SHARED),
        ("auto", (1, 2), SHARED),
        ("torch", (2, 2), SHARED),
        ("torch", (2, 2), OWN),
    ],
)
def test_preempted_requests_of_ranks_go_on(tmp_path: Path, kernels: str, sizes: tuple[int, int], pools: str) -> None:
    make_checkpoint(tmp_path, "llama")
    found = []
    for engine in (
        built(tmp_path, *sizes, num_blocks=9, cpu_kernels=kernels, rank_pools=pools)[0],
        alone(tmp_path, num_blocks=9, cpu_kernels=kernels),
    ):
        for number in range(3):
            engine.core.add(
                key_of(number), Prompt.of(prompt(9, first=number)), DecodingParams(temperature=0.0, max_tokens=11)
            )
        found.append(tokens(engine))
        assert engine.core.status().num_preemptions > 0
        engine.executor.close()
    assert found[0] == found[1]
    assert len(found[0]) == 3


@pytest.mark.parametrize(
    ("family", "size", "num_stages", "pools"),
    [
        ("qwen2-moe", 2, 1, SHARED),
        ("deepseek-v2", 2, 2, OWN),
        ("gpt2", 2, 1, SHARED),
        ("cohere2", 1, 2, SHARED),
        ("phi3", 2, 1, SHARED),
        ("olmo2", 4, 1, SHARED),
        ("olmoe", 2, 1, SHARED),
        ("gpt-oss", 2, 2, SHARED),
        ("lfm2", 2, 2, OWN),
        ("lfm2", 4, 1, SHARED),
        ("qwen3-next", 2, 1, OWN),
        ("qwen3-next", 2, 3, SHARED),
    ],
)
def test_families_are_divided(tmp_path: Path, family: str, size: int, num_stages: int, pools: str) -> None:
    make_model(tmp_path, family)
    engine, executor = built(tmp_path, size, num_stages, rank_pools=pools)
    assert answers(engine) == answers(alone(tmp_path))
    executor.close()


def test_a_step_may_take_as_long_as_the_engine_has_learnt(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    engine, executor = built(tmp_path, 1, 2)
    executor.limits.clear()
    engine.core.add(key_of(1), Prompt.of(prompt(4)), DecodingParams(temperature=0.0, max_tokens=1))
    tokens(engine)
    assert set(executor.limits) == {STEP_TIMEOUT_S}
    measure_first_costs(engine.runner, engine.core.costs, engine.core.limits, most_s=10.0)
    engine.core.add(key_of(1), Prompt.of(prompt(4)), DecodingParams(temperature=0.0, max_tokens=1))
    tokens(engine)
    assert executor.limits[-1] == LEAST_S
    executor.close()


def test_log_probabilities_of_a_prompt_are_those_of_one_rank(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    engine, executor = built(tmp_path, 2)
    found: list[list[RowsRead]] = []
    for each in (engine, alone(tmp_path)):
        scored = DecodingParams(temperature=0.0, max_tokens=2, prompt_logprobs=0)
        each.core.add(key_of(1), Prompt.of(prompt(13)), scored)
        each.core.add(key_of(2), Prompt.of(prompt(9, first=2)), scored, reading=MeanOfRows())
        found.append([output.read for output in outputs_of(each) if output.read is not None])
    assert [read.first_row for read in found[0]] == [read.first_row for read in found[1]]
    assert len({len(read.values) for read in found[0]}) > 1
    for led, own in zip(*found, strict=True):
        assert led.is_valid
        assert np.frombuffer(led.values, "<f4") == pytest.approx(np.frombuffer(own.values, "<f4"), abs=1e-5)
    executor.close()


def test_layers_of_earlier_stages_count_as_stored_when_the_driver_begins(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", changes={"num_hidden_layers": 3})
    engine, executor = built(tmp_path, 1, 2)
    engine.core.add(key_of(1), Prompt.of(prompt(4)), DecodingParams(temperature=0.0, max_tokens=1))
    blocks, told = engine.memory.paged.blocks.zero_(), list[int]()

    def watch(step: Step) -> LayerStored:
        return lambda: told.append(sum(bool(layer.any()) for layer in blocks.chunk(3, dim=1)))

    tokens(engine, watch)
    assert told == [2, 2, 3]
    executor.close()


def test_a_layer_counts_as_stored_when_every_rank_has_stored_it(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", changes={"num_hidden_layers": 3})
    engine, executor = built(tmp_path, 2)
    told: list[int] = []
    engine.core.add(key_of(1), Prompt.of(prompt(5)), DecodingParams(temperature=0.0, max_tokens=1))

    def watch(step: Step) -> LayerStored:
        executor.calls.num_sums = 0
        return lambda: told.append(executor.calls.num_sums)

    tokens(engine, watch)
    # one sum for the embedding, two for each layer: of the first layer it is told after its attention was added up
    assert len(told) == 3
    assert told[0] >= 2
    assert told[1] >= 4
    assert told[2] == 7
    executor.close()


@pytest.mark.parametrize(("family", "sizes"), [("llama", (4, 1)), ("lfm2", (4, 1)), ("qwen3-next", (2, 2))])
def test_ranks_share_one_block_and_each_has_its_heads_in_it(
    tmp_path: Path, family: str, sizes: tuple[int, int]
) -> None:
    make_model(tmp_path, family)
    blocks = []
    for engine in (built(tmp_path, *sizes)[0], alone(tmp_path)):
        engine.core.add(key_of(1), Prompt.of(prompt(8)), DecodingParams(temperature=0.0, max_tokens=1))
        tokens(engine)
        blocks.append(engine.memory.paged.blocks.clone())
        engine.executor.close()
    assert blocks[0].allclose(blocks[1], atol=1e-4)
    assert blocks[0].abs().sum() > 0


@pytest.mark.parametrize(
    ("changes", "num_ranks", "reason"),
    [
        ({}, 3, "4 attention heads cannot be divided among 3 ranks"),
        ({"intermediate_size": 129}, 2, "129 rows of the MLP cannot be divided among 2 ranks"),
        ({"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}, 2, "3 key and value heads"),
    ],
)
def test_what_cannot_be_divided_is_said_before_anything_starts(
    tmp_path: Path, changes: dict[str, object], num_ranks: int, reason: str
) -> None:
    config = load_config(make_checkpoint(tmp_path, "llama", changes=changes))
    with pytest.raises(ModelLoadError, match=reason):
        require_divisible(config, num_ranks)
    with pytest.raises(InvalidSetting, match=f"--tensor-parallel-size {num_ranks}: {reason}"):
        alone(tmp_path, tensor_parallel_size=num_ranks)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"tensor_parallel_size": 0}, "--tensor-parallel-size: 0 is not from 1 to 64"),
        ({"tensor_parallel_size": 65}, "--tensor-parallel-size: 65 is not from 1 to 64"),
        ({"pipeline_parallel_size": 65}, "--pipeline-parallel-size: 65 is not from 1 to 64"),
        ({"tensor_parallel_size": 8, "pipeline_parallel_size": 9}, "8 in 9 stages are more than 64 ranks"),
        ({"pipeline_parallel_size": 3}, "--pipeline-parallel-size 3: 2 layers cannot be divided among 3 stages"),
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "uni"}, "uni is one process"),
        ({"tensor_parallel_size": 2, "device": "emulated", "rank_pools": SHARED}, "on a device with memory of its own"),
    ],
)
def test_settings_that_do_not_fit_are_one_line(tmp_path: Path, settings: dict[str, object], reason: str) -> None:
    make_checkpoint(tmp_path, "llama")
    with pytest.raises(InvalidSetting, match=reason):
        alone(tmp_path, **settings)
