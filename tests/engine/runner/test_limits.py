from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.device.emulated import EmulatedDevice
from baton.engine.attention.torch_backend import TorchAttention
from baton.engine.models.decoder import Decoder
from baton.engine.runner.kv_memory import allocate_private, host_kv_memory
from baton.engine.runner.limits import RunnerLimits, graph_size, graph_sizes, staging_bytes
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.runner.prompt_scoring import PromptScoring
from baton.engine.runner.sampler import Sampler
from baton.engine.scheduler.reading import ReadSpan
from baton.engine.scheduler.request import ScheduledRequest
from baton.engine.scheduler.step import Step
from baton.wire.layout import KvLayout
from baton.wire.sampling import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, DecodingParams
from tests.engine.runner.relay import BLOCK_SIZE, MAX_BLOCKS, load_decoder, scheduled
from tests.request_keys import key_of


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (30, (1, 2, 4, 8, 16, 24, 30)),
        (64, (1, 2, 4, *range(8, 65, 8))),
        (330, (1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), 288, 320, 330)),
    ],
)
def test_graph_sizes(max_num_seqs: int, sizes: tuple[int, ...]) -> None:
    assert graph_sizes(max_num_seqs) == sizes


@given(st.integers(1, 700))
def test_every_batch_fits_a_graph_with_little_padding(max_num_seqs: int) -> None:
    sizes = graph_sizes(max_num_seqs)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == max_num_seqs
    for count in range(1, max_num_seqs + 1):
        size = graph_size(sizes, count)
        assert size is not None
        assert count <= size <= max(count * 1.15 + 7, count)
    assert graph_size(sizes, max_num_seqs + 1) is None


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_decoder(tmp_path_factory.mktemp("checkpoint") / "llama")


def hardest(vocab_size: int, choose: random.Random) -> DecodingParams:
    """All that takes staging memory, or all but the report: rows are named only when some rows have none."""
    ids = tuple(range(min(vocab_size, MAX_LOGIT_BIAS)))
    return DecodingParams(
        seed=1,
        top_k=choose.choice([0, 5]),
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        logit_bias_ids=ids,
        logit_bias_values=(0.5,) * len(ids),
        min_tokens=99,
        allowed_token_ids=ids,
        bad_word_ids=((5,), (5, 6)),
        stop_token_ids=tuple(index % vocab_size for index in range(MAX_STOP_TOKEN_IDS)),
        logprobs=choose.choice([3, 3, 3, None]),
    )


@pytest.mark.parametrize("change_bytes", [4 * 2**20, 2**14])
@pytest.mark.parametrize(("max_num_seqs", "max_step_tokens"), [(1, 1), (7, 64), (16, 16), (24, 300)])
def test_no_step_overflows_the_staging_memory(
    change_bytes: int,
    max_num_seqs: int,
    max_step_tokens: int,
    decoder: Decoder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("baton.engine.runner.sampling_plan.CHANGE_BYTES", change_bytes)
    choose = random.Random(max_num_seqs)
    vocab_size = decoder.config.vocab_size
    params = [hardest(vocab_size, choose) for _ in range(4)]
    limits = RunnerLimits(max_num_seqs, max_step_tokens, MAX_BLOCKS)
    layout = KvLayout.of_layers("float32", BLOCK_SIZE, decoder.layer_kvs)
    paged = host_kv_memory(layout, MAX_BLOCKS, allocate_private).paged
    sampler = Sampler(frozenset({1}), vocab_size)
    runner = ModelRunner(decoder, TorchAttention(paged), paged.blocks, sampler, EmulatedDevice(), limits)
    longest = MAX_BLOCKS * BLOCK_SIZE
    for _ in range(6):
        # sequences share all blocks: what they compute does not matter here
        left, shares, spans = max_step_tokens, list[ScheduledRequest](), list[ReadSpan]()
        while left > 0 and len(shares) < max_num_seqs:
            count = min(left, choose.choice([1, longest, choose.randint(1, longest)]))
            token_ids = [choose.randrange(vocab_size) for _ in range(longest)]
            row = len(shares)
            start = longest - count
            shares.append(
                scheduled(key_of(row), start, count, token_ids, 1, list(range(MAX_BLOCKS)), params[row % len(params)])
            )
            left -= count
            if (num_scored := min(count, longest - 1 - start)) > 0:
                spans.append(ReadSpan(key_of(row), PromptScoring(20), start, num_scored))
        running = runner.launch(Step(tuple(shares), tuple(spans)))
        assert running.result().keys() == {share.key for share in shares}
        assert running.rows_read().keys() == {span.key for span in spans}


def test_staging_grows_with_every_limit() -> None:
    base = RunnerLimits(8, 64, 16)
    for larger in (RunnerLimits(9, 64, 16), RunnerLimits(8, 80, 16), RunnerLimits(8, 64, 17)):
        assert staging_bytes(larger) > staging_bytes(base)
