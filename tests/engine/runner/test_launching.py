from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from baton.device.base import Array, Device, Staging
from baton.device.emulated import EmulatedDevice, EmulatedGraph, EmulatedStaging
from baton.device.host import HostDevice
from baton.engine.attention.base import LayerStored, PlannedShare, SequenceShare
from baton.engine.models.decoder import Decoder
from baton.engine.runner.graphs import one_token_each
from baton.engine.runner.inputs import TokenUnknown
from baton.engine.runner.limits import RunnerLimits, graph_sizes
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.runner.prompt_scoring import PromptScoring
from baton.engine.runner.sampler import Sampler
from baton.engine.scheduler.reading import ReadSpan
from baton.engine.scheduler.request import PENDING_TOKEN
from baton.engine.scheduler.step import Step
from baton.wire.sampling import DecodingParams
from tests.engine.runner.relay import (
    BLOCK_SIZE,
    LIMITS,
    SPARE_BLOCK,
    PagedAttention,
    Stream,
    choose_steps,
    drive,
    load_decoder,
    make_kv,
    make_runner,
    make_streams,
    scheduled,
)
from tests.request_keys import A, B, C, key_of

GREEDY = DecodingParams(temperature=0.0)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder: Path = tmp_path_factory.mktemp("checkpoint")
    return load_decoder(folder / "llama")


def computed(runner: ModelRunner, seed: int, *, late: bool) -> list[Stream]:
    """Streams after the same random steps."""
    streams = make_streams(10, seed)
    drive(runner, streams, choose_steps(10, 14, seed), late=late)
    return streams


@pytest.fixture(scope="module")
def recorded(decoder: Decoder) -> ModelRunner:
    runner = make_runner(decoder, EmulatedDevice(), make_kv(decoder))
    assert runner.record_graphs() == len(graph_sizes(LIMITS.max_num_seqs))
    return runner


def test_a_prompt_is_scored_also_where_a_graph_could_compute_the_step(decoder: Decoder, recorded: ModelRunner) -> None:
    step = Step((scheduled(A, 0, 1, [5, 6, 7], 3, [1], GREEDY),), (ReadSpan(A, PromptScoring(2), 0, 1),))
    plain = make_runner(decoder, HostDevice(), make_kv(decoder)).launch(step)
    launched = recorded.launch(step)
    assert launched.result() == plain.result() == {}
    assert launched.rows_read() == plain.rows_read()
    assert launched.rows_read()[A].is_valid


def test_a_prompt_for_which_the_model_computes_nan_has_no_valid_scores(decoder: Decoder) -> None:
    step = Step((scheduled(A, 0, 2, [5, 6, 7], 3, [1], GREEDY),), (ReadSpan(A, PromptScoring(0), 0, 2),))
    runner = make_runner(decoder, HostDevice(), make_kv(decoder))
    with mock.patch.object(decoder, "logits", lambda hidden: torch.full((len(hidden), 320), torch.nan)):
        running = runner.launch(step)
    running.result()
    assert not running.rows_read()[A].is_valid


def tokens_of(streams: list[Stream]) -> list[list[int]]:
    return [[token.token_id for token in stream.sampled] for stream in streams]


@pytest.mark.parametrize("seed", range(4))
def test_graphs_pending_tokens_and_late_results_change_no_token(
    seed: int, decoder: Decoder, recorded: ModelRunner
) -> None:
    expected = computed(make_runner(decoder, HostDevice(), make_kv(decoder)), seed, late=False)
    assert min(len(stream.sampled) for stream in expected) > 0
    eager = make_runner(decoder, EmulatedDevice(), make_kv(decoder))
    assert tokens_of(computed(eager, seed, late=True)) == tokens_of(expected)
    with mock.patch.object(EmulatedGraph, "replay", autospec=True, side_effect=EmulatedGraph.replay) as replay:
        found = computed(recorded, seed, late=True)
        late = replay.call_count
        assert tokens_of(found) == tokens_of(expected)
        assert tokens_of(computed(recorded, seed, late=False)) == tokens_of(expected)
    assert late > 5
    assert replay.call_count == 2 * late
    for stream, other in zip(found, expected, strict=True):
        for token, same in zip(stream.sampled, other.sampled, strict=True):
            assert (token.logprobs is None) == (same.logprobs is None)
            if token.logprobs is not None and same.logprobs is not None:
                assert token.logprobs.logprob == pytest.approx(same.logprobs.logprob, abs=1e-4)


def test_one_step_is_one_upload(decoder: Decoder) -> None:
    with mock.patch.object(EmulatedStaging, "upload", autospec=True, side_effect=EmulatedStaging.upload) as upload:
        runner = make_runner(decoder, EmulatedDevice(), make_kv(decoder))
        drive(runner, make_streams(6, 0), [range(6), range(3), range(6)], late=True)
    assert upload.call_count == 3


def test_behind_the_plan_of_attention_lie_only_changed_logits(decoder: Decoder, recorded: ModelRunner) -> None:
    """A plan may keep much room that it does not use; behind its last value nothing needs to be sent."""
    order: list[str] = []
    plan, put = PagedAttention.plan, EmulatedStaging.put

    def noted_put(*args: Any) -> torch.Tensor:
        order.append("put")
        return put(*args)

    def noted_plan(*args: Any) -> None:
        plan(*args)
        order.append("plan")

    with (
        mock.patch.object(EmulatedStaging, "put", noted_put),
        mock.patch.object(PagedAttention, "plan", noted_plan),
    ):
        for penalty in (0.0, 1.0):
            params = DecodingParams(top_p=0.9, logprobs=1, seed=3, presence_penalty=penalty)
            shares = [scheduled(A, 1, 1, [3, 4], 1, [0], params), scheduled(B, 1, 1, [3, 4], 1, [1], GREEDY)]
            recorded.launch(Step(tuple(shares))).result()
            assert order[-2:] == (["put", "put"] if penalty else ["put", "plan"])


@pytest.mark.parametrize("num_sequences", [1, 3, 5, 9, 12])
def test_padding_touches_no_block_of_the_pool(num_sequences: int, decoder: Decoder, recorded: ModelRunner) -> None:
    kv = recorded._attention.kv  # type: ignore[attr-defined]
    kv.copy_(torch.randn(kv.shape, generator=torch.Generator().manual_seed(num_sequences)))
    before = kv.clone()
    tables = [[3 * row + 1, 3 * row + 2] for row in range(num_sequences)]
    shares = [scheduled(key_of(row), 5, 1, [7] * 6, 1, tables[row], GREEDY) for row in range(num_sequences)]
    with mock.patch.object(EmulatedGraph, "replay", autospec=True, side_effect=EmulatedGraph.replay) as replay:
        assert len(recorded.launch(Step(tuple(shares))).result()) == num_sequences
    assert replay.call_count == 1
    written = torch.zeros(kv.shape, dtype=torch.bool)
    for table in tables:
        written[table[1], ..., 5 % BLOCK_SIZE, :] = True
    assert (kv != before)[written].all()
    written[SPARE_BLOCK] = True
    assert torch.equal(kv.view(torch.int32)[~written], before.view(torch.int32)[~written])


def test_a_pending_token_that_no_step_samples_is_an_error(decoder: Decoder) -> None:
    runner = make_runner(decoder, EmulatedDevice(), make_kv(decoder))
    runner.launch(Step((scheduled(A, 0, 2, [5, 6], 2, [0], GREEDY),)))
    runner.launch(Step((scheduled(B, 0, 2, [5, 6], 2, [1], GREEDY),)))
    with pytest.raises(TokenUnknown, match=r"token 2 of .*-a'"):
        runner.launch(Step((scheduled(A, 2, 1, [5, 6, PENDING_TOKEN], 2, [0], GREEDY),)))
    # a step that could not be launched leaves the sampled tokens in place, a step that samples nothing does not
    follower = scheduled(B, 2, 1, [5, 6, PENDING_TOKEN], 2, [1], GREEDY)
    assert runner.launch(Step((follower,))).result().keys() == {B}
    assert runner.launch(Step((scheduled(C, 0, 1, [5, 6], 2, [2], GREEDY),))).result() == {}
    with pytest.raises(TokenUnknown, match=r"token 2 of .*-b'"):
        runner.launch(Step((follower,)))


def test_a_pending_token_may_end_a_longer_share(decoder: Decoder) -> None:
    """The prompt is computed again, together with the pending token."""
    tokens = []
    for device in (HostDevice(), EmulatedDevice()):
        runner = make_runner(decoder, device, make_kv(decoder))
        first = runner.launch(Step((scheduled(A, 0, 3, [5, 6, 7], 3, [0], GREEDY),)))
        last = first.result()[A][0].token_id if not device.is_asynchronous else PENDING_TOKEN
        again = runner.launch(Step((scheduled(A, 0, 4, [5, 6, 7, last], 3, [4], GREEDY),)))
        tokens.append((first.result()[A][0].token_id, again.result()[A][0].token_id))
    assert tokens[0] == tokens[1]


def test_a_single_token_that_is_not_due_samples_nothing(decoder: Decoder, recorded: ModelRunner) -> None:
    """A budget may leave one token of a prompt to a step of decodes."""
    shares = [
        scheduled(key_of("prompt"), 0, 1, [4, 5, 6], 3, [0], GREEDY),
        scheduled(A, 0, 1, [9], 1, [1], GREEDY),
        scheduled(B, 0, 1, [7], 1, [2], GREEDY),
    ]
    expected = make_runner(decoder, HostDevice(), make_kv(decoder)).launch(Step(tuple(shares))).result()
    assert expected.keys() == {A, B}
    assert recorded.launch(Step(tuple(shares))).result() == expected
    assert recorded.launch(Step(tuple(shares[:1]))).result() == {}


def test_warming_up_touches_no_block_of_the_pool(decoder: Decoder) -> None:
    kv = make_kv(decoder)
    before = kv.clone()
    runner = make_runner(decoder, EmulatedDevice(), kv)
    with mock.patch.object(ModelRunner, "launch", autospec=True, side_effect=ModelRunner.launch) as launch:
        runner.warm_up()
    assert [[share.num_tokens for share in call.args[1].requests] for call in launch.call_args_list] == [[1, 2], [1]]
    assert torch.equal(kv[:SPARE_BLOCK], before[:SPARE_BLOCK])
    assert not torch.equal(kv[SPARE_BLOCK], before[SPARE_BLOCK])


@pytest.mark.parametrize("limits", [(1, 1, [1]), (1, 64, [1]), (8, 2, [1]), (8, 3, [1, 2])])
def test_warming_up_keeps_to_the_limits(decoder: Decoder, limits: tuple[int, int, list[int]]) -> None:
    max_num_seqs, max_tokens, first = limits
    sampler = Sampler(frozenset(), decoder.config.vocab_size)
    narrow = RunnerLimits(max_num_seqs, max_tokens, LIMITS.max_blocks_per_request, SPARE_BLOCK)
    kv = make_kv(decoder)
    runner = ModelRunner(decoder, PagedAttention(kv), kv, sampler, EmulatedDevice(), narrow)
    with mock.patch.object(ModelRunner, "launch", autospec=True, side_effect=ModelRunner.launch) as launch:
        runner.warm_up()
    assert [share.num_tokens for share in launch.call_args_list[0].args[1].requests] == first


def test_a_host_needs_no_warming_up(decoder: Decoder) -> None:
    sampler = Sampler(frozenset(), decoder.config.vocab_size)
    limits = RunnerLimits(4, 16, LIMITS.max_blocks_per_request)
    kv = make_kv(decoder)
    runner = ModelRunner(decoder, BreakingAttention(kv), kv, sampler, HostDevice(), limits)
    runner.warm_up()


@pytest.mark.parametrize("num_tokens", [1, 5])
def test_every_layer_of_a_watched_step_is_told_of(num_tokens: int, decoder: Decoder, recorded: ModelRunner) -> None:
    """By the device: a host that issues a step knows of no layer that it is stored."""
    calls: list[int] = []
    share = scheduled(A, 0, num_tokens, [3] * (num_tokens + 1), 9, [0, 1], GREEDY)
    running = recorded.launch(Step((share,)), lambda: calls.append(threading.get_ident()))
    assert running.result() == {}
    recorded._device.settle()
    assert len(calls) == decoder.config.num_layers
    assert threading.get_ident() not in calls


class BreakingAttention(PagedAttention):
    """Computes one layer."""

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See `Attention.run`."""
        if layer == 1:
            raise MemoryError("no room")
        return super().run(layer, q, k, v)


def test_no_layer_of_a_step_is_reported_after_it_has_failed(decoder: Decoder) -> None:
    device = EmulatedDevice()
    sampler = Sampler(frozenset(), decoder.config.vocab_size)
    kv = make_kv(decoder)
    runner = ModelRunner(decoder, BreakingAttention(kv), kv, sampler, device, LIMITS)
    calls: list[int] = []
    share = scheduled(A, 0, 2, [3, 4], 2, [0], GREEDY)
    with pytest.raises(MemoryError):
        runner.launch(Step((share,)), lambda: calls.append(1))
    assert calls == [1]
    device.settle()
    assert calls == [1]


def test_a_step_that_failed_has_ended_when_its_launch_has(decoder: Decoder) -> None:
    """What it had issued may still be writing into its blocks."""
    device, order = EmulatedDevice(), list[str]()

    class Pending:
        def wait(self, timeout_s: float = 0.0) -> tuple[Array, ...]:
            order.append("waited")
            return ()

    sampler = Sampler(frozenset(), decoder.config.vocab_size)
    kv = make_kv(decoder)
    runner = ModelRunner(decoder, BreakingAttention(kv), kv, sampler, device, LIMITS)
    with mock.patch.object(device, "fetch", return_value=Pending()), pytest.raises(MemoryError):
        runner.launch(Step((scheduled(A, 0, 2, [3, 4], 2, [0], GREEDY),)))
    assert order == ["waited"]


class WanderingAttention(PagedAttention):
    """Puts one array more from the second plan on."""

    def __init__(self, kv: torch.Tensor) -> None:
        super().__init__(kv)
        self._num_plans = 0

    def plan(self, shares: Sequence[PlannedShare], staging: Staging, layer_stored: LayerStored | None = None) -> None:
        """See `AttentionBackend.plan`."""
        self._num_plans += 1
        if self._num_plans > 1:
            staging.put(torch.zeros(3).numpy())
        super().plan(shares, staging, layer_stored)

    def for_graph(self, num_sequences: int) -> PagedAttention:
        """See `AttentionBackend.for_graph`."""
        return WanderingAttention(self.kv)


def test_inputs_of_a_graph_that_moved_are_refused(decoder: Decoder) -> None:
    sampler = Sampler(frozenset(), decoder.config.vocab_size)
    kv = make_kv(decoder)
    runner = ModelRunner(decoder, WanderingAttention(kv), kv, sampler, EmulatedDevice(), LIMITS)
    runner.record_graphs()
    with pytest.raises(RuntimeError, match="not where they were"):
        runner.launch(Step((scheduled(A, 0, 1, [3], 1, [0], GREEDY),)))


def test_graphs_are_recorded_largest_first_where_that_is_possible(decoder: Decoder) -> None:
    seen: list[tuple[int, int]] = []
    asked: list[int] = []
    runner = make_runner(decoder, EmulatedDevice(), make_kv(decoder))
    for_graph = PagedAttention.for_graph

    def ask(attention: PagedAttention, num_sequences: int) -> PagedAttention | None:
        asked.append(num_sequences)
        return for_graph(attention, num_sequences)

    with mock.patch.object(PagedAttention, "for_graph", ask):
        assert runner.record_graphs(lambda done, total: seen.append((done, total))) == 5
    assert seen == [(done, 5) for done in range(1, 6)]
    assert asked == [12, 8, 4, 2, 1]
    assert make_runner(decoder, HostDevice(), make_kv(decoder)).record_graphs() == 0
    assert make_runner(decoder, EmulatedDevice(), make_kv(decoder), is_recordable=False).record_graphs() == 0


@pytest.mark.parametrize("make_device", [HostDevice, EmulatedDevice])
def test_a_runner_is_asynchronous_when_its_device_is(make_device: Callable[[], Device], decoder: Decoder) -> None:
    device = make_device()
    assert make_runner(decoder, device, make_kv(decoder)).is_asynchronous == device.is_asynchronous


def test_tokens_of_a_chunk_are_no_rows_of_a_graph() -> None:
    decoding, chunk = scheduled(A, 4, 1, [3] * 5, 2, [0, 1], GREEDY), scheduled(A, 3, 2, [3] * 5, 2, [0, 1], GREEDY)
    drafting = decoding.with_drafts([7, 8])
    assert one_token_each([decoding]) == [decoding]
    assert one_token_each([decoding, drafting]) == [SequenceShare(start, 1, [0, 1]) for start in (4, 4, 5, 6)]
    assert one_token_each([drafting, chunk]) is None
    assert one_token_each([chunk.with_drafts([7, 8])]) is None
