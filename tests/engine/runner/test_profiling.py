from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor

from baton.device.base import Device
from baton.device.emulated import EmulatedDevice
from baton.device.host import HostDevice
from baton.engine.models.decoder import Decoder
from baton.engine.runner.limits import RunnerLimits
from baton.engine.runner.profiling import StorelessAttention, profile
from baton.engine.runner.sampler import Sampler
from baton.engine.runner.sampling_plan import SamplingPlan
from tests.engine.runner.relay import load_decoder


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_decoder(tmp_path_factory.mktemp("checkpoint") / "llama")


@pytest.mark.parametrize("make_device", [HostDevice, EmulatedDevice])
@pytest.mark.parametrize(("max_num_seqs", "max_step_tokens"), [(6, 100), (8, 8)])
def test_the_largest_step_is_computed(
    make_device: Callable[[], Device], max_num_seqs: int, max_step_tokens: int, decoder: Decoder
) -> None:
    seen: list[tuple[int, ...]] = []

    class Spy(StorelessAttention):
        def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            seen.append(tuple(q.shape))
            return super().run(layer, q, k, v)

    sampler = Sampler(frozenset(), decoder.config.vocab_size)
    with mock.patch.object(Sampler, "sample", autospec=True, side_effect=Sampler.sample) as sample:
        profile(decoder, sampler, make_device(), RunnerLimits(max_num_seqs, max_step_tokens, 9), Spy())
    config = decoder.config
    assert seen == [(max_step_tokens, config.num_heads, config.head_dim)] * config.num_layers
    plan: SamplingPlan = sample.call_args.args[1]
    logits: Tensor = sample.call_args.args[2]
    assert logits.shape == (max_num_seqs, config.vocab_size)
    assert logits.dtype == torch.float32
    # the operations that take the most memory: every row in order, its own distribution beside it
    assert [group.width for group in sample.call_args.args[3].groups] == [config.vocab_size]
    assert len(plan.reports) == max_num_seqs
