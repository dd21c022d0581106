"""Ranks on devices with memory of their own, each an emulated one: asynchronous steps, recorded graphs with the calls
among ranks in them, tokens that the host does not know yet, and stages between which only devices hand anything on. The
tokens are those of one rank on the host."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from baton.device.emulated import EmulatedDevice, EmulatedGraph
from baton.engine.models.config import load_config
from baton.engine.models.decoder import Decoder
from baton.engine.models.dummy import fill_with_noise
from baton.engine.models.ops.torch_ops import TorchOps
from baton.engine.models.shard import Shard
from baton.engine.runner.limits import RunnerLimits
from baton.engine.runner.profiling import profile, profile_shard
from baton.engine.runner.sampler import Sampler
from baton.engine.scheduler.request import Request
from baton.engine.settings import EngineSettings
from baton.ranks.executor.choose import open_executor
from baton.wire.errors import InvalidSetting
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams
from tests.checkpoints import make_checkpoint
from tests.engine.scheduler.proposers import Guessing
from tests.engine.test_emulated_engine import choose_stand_in
from tests.ranks.executor.test_steps_of_ranks import alone, answers, outputs_of, prompt, tokens_in
from tests.ranks.executor.thread_ranks import GlooExecutor, SharedCalls, ThreadCollectives, built, orders_of
from tests.request_keys import key_of

SETTINGS: dict[str, Any] = {"device": "emulated", "block_size": 16, "max_num_seqs": 6}


@pytest.mark.parametrize(("size", "num_stages"), [(2, 1), (1, 2), (2, 3)])
def test_recorded_steps_of_ranks_draw_the_tokens_of_one(tmp_path: Path, size: int, num_stages: int) -> None:
    folder = make_checkpoint(tmp_path, "qwen3", changes={"head_dim": 64, "num_hidden_layers": 3})
    replay = mock.patch.object(EmulatedGraph, "replay", autospec=True, side_effect=EmulatedGraph.replay)
    with mock.patch("baton.engine.model_shard.choose_attention", choose_stand_in), replay as replayed:
        engine, executor = built(folder, size, num_stages, executor=GlooExecutor, **SETTINGS)
        assert isinstance(engine.device, EmulatedDevice)
        assert engine.device.num_graphs == 4
        assert engine.memory.is_divided
        found = answers(engine)
        executor.close()
    assert found == answers(alone(folder, block_size=16))
    orders = orders_of(executor)
    num_recorded = sum(order.is_recorded for order in orders)
    # all ranks replay what the driver does
    assert replayed.call_count == size * num_stages * num_recorded > 0
    # steps began with tokens that the host did not know; of several stages, chunks of a prompt were in all of them, and
    # one more was ordered
    assert any(order.sources for order in orders) == (num_stages == 1)
    assert executor.most_in_flight == (num_stages + 1 if num_stages > 1 else 0)


@pytest.mark.parametrize(("size", "num_stages"), [(2, 1), (2, 2)])
def test_ranks_replay_steps_with_drafts_together(tmp_path: Path, size: int, num_stages: int) -> None:
    folder = make_checkpoint(tmp_path, "qwen3", changes={"head_dim": 64, "num_hidden_layers": 3})
    expected = answers(alone(folder, block_size=16))
    proposer = Guessing(lambda request, count: _following(expected, request, count), 0.8, most=3)
    with mock.patch("baton.engine.model_shard.choose_attention", choose_stand_in):
        engine, executor = built(folder, size, num_stages, executor=GlooExecutor, proposer=proposer, **SETTINGS)
        assert answers(engine) == expected
        executor.close()
    assert 0 < proposer.num_accepted < proposer.num_drafts
    # rows of one request, in graphs
    recorded = [order for order in orders_of(executor) if order.is_recorded]
    assert any(len({share.blocks for share in order.shares}) < len(order.shares) for order in recorded)


def _following(expected: dict[RequestKey, list[int]], request: Request, count: int) -> list[int]:
    first = len(request.token_ids) - request.num_prompt_tokens
    return expected[request.key][first : first + count]


@pytest.mark.parametrize(("size", "num_stages"), [(2, 1), (1, 2)])
def test_eager_steps_of_ranks_are_ahead_of_the_host_too(tmp_path: Path, size: int, num_stages: int) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    engine, executor = built(folder, size, num_stages, executor=GlooExecutor, **SETTINGS, enforce_eager=True)
    found = []
    for each in (engine, alone(folder, block_size=16)):
        for number in range(3):
            params = DecodingParams(temperature=0.0, max_tokens=7, prompt_logprobs=0 if number else None)
            each.core.add(key_of(number), Prompt.of(prompt(9 + number, first=number)), params)
        outputs = outputs_of(each)
        found.append((tokens_in(outputs), [(each.key, each.read.first_row) for each in outputs if each.read]))
    executor.close()
    assert found[0] == found[1]
    assert not any(order.is_recorded for order in orders_of(executor))
    assert any(order.sources for order in orders_of(executor)) == (num_stages == 1)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_ranks_measure_together(tmp_path: Path, num_stages: int) -> None:
    config = load_config(make_checkpoint(tmp_path, "llama", vocab_size=321))
    limits, stages = RunnerLimits(4, 12, 8), [SharedCalls(2) for _ in range(num_stages)]

    def measure(number: int) -> None:
        shard, device = Shard.of_process(number, 2, num_stages), EmulatedDevice()
        collectives = ThreadCollectives(shard.rank, stages[shard.stage])
        decoder = Decoder(config, torch.float32, "cpu", TorchOps(), shard, collectives)
        fill_with_noise(decoder)
        if number == 0:
            profile(decoder, Sampler(frozenset(), config.vocab_size), device, limits)
        else:
            profile_shard(decoder, device, limits)
        device.close()

    with ThreadPoolExecutor(2 * num_stages) as threads:
        list(threads.map(measure, range(2 * num_stages)))
    # an embedding, and two sums for each layer
    assert sum(calls.num_sums for calls in stages) == 1 + 2 * config.num_layers


def test_more_ranks_than_gpus_are_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = load_config(make_checkpoint(tmp_path, "llama"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    device = mock.Mock(has_own_memory=True, torch_device=torch.device("cuda", 0))
    basis = mock.Mock(settings=EngineSettings(tensor_parallel_size=2), config=config, device=device)
    starter = mock.Mock()
    with pytest.raises(InvalidSetting, match="2 ranks of a node need a GPU each, and this process sees 1 "):
        open_executor(basis, 1, starter)
    starter.start.assert_not_called()
