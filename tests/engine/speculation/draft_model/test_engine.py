"""A draft model in whole engines: ids and log probabilities are those of decoding without one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from baton import LLM, SamplingParams
from baton.engine.build import Engine
from baton.engine.handoffs import FirstToken
from baton.engine.settings import SHARED
from baton.engine.speculation.draft_model.passes import DraftPasses
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams
from tests.checkpoints import make_checkpoint
from tests.engine.models.families import make_model
from tests.engine.scheduler.all_drafts import AllDrafts
from tests.engine.test_drafts import NUM_OUTPUT, SIZES, assert_same, built, said
from tests.ranks.executor import thread_ranks
from tests.request_keys import key_of

PROMPT_IDS = [(7 * number) % 150 for number in range(30)]


def draft_config(draft: Path, num_tokens: int = 4, **values: Any) -> str:
    return json.dumps({"method": "draft_model", "model": str(draft), "num_speculative_tokens": num_tokens, **values})


@pytest.fixture(autouse=True)
def _verify_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many drafts pay is a question of time; and text never comes first."""
    monkeypatch.setattr("baton.engine.speculation.building.DraftDepth", AllDrafts)
    monkeypatch.setattr("baton.engine.speculation.text_first._SURE", 2.0)


def counts_of(engine: Engine) -> tuple[int, int]:
    """Tokens that were guessed, and those of them that were right."""
    (counts,) = [each for each in engine.core.draft_counts.by_method() if each.method == "draft_model"]
    return sum(counts.tokens_by_position), sum(counts.accepted_by_position)


@pytest.mark.parametrize(
    "settings",
    [
        {"batch_invariant": True},
        {"cpu_kernels": "torch"},
        {"kv_cache_dtype": "fp8"},
        {"num_blocks": 26, "enable_prefix_caching": False},
        {"device": "emulated"},
        {"device": "emulated", "enforce_eager": True},
    ],
    ids=["native", "torch", "fp8", "preempted", "graphs", "asynchronous"],
)
def test_a_draft_that_is_the_model_is_right_and_changes_nothing(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Greedy and sampled, with penalties and without: it draws by the noise of the place."""
    make_model(tmp_path, "llama")
    plain = said(built(tmp_path, **settings))
    engine = built(tmp_path, speculative_config=draft_config(tmp_path), **settings)
    found = said(engine)
    assert_same(plain, found, is_exact="batch_invariant" in settings)
    num_drafts, num_accepted = counts_of(engine)
    assert num_drafts > 100
    assert num_accepted > 0.9 * num_drafts
    assert found.num_steps < 0.7 * plain.num_steps


@pytest.mark.parametrize("settings", [{"batch_invariant": True}, {"num_blocks": 26}], ids=["native", "preempted"])
def test_a_draft_that_knows_nothing_changes_nothing(tmp_path: Path, settings: dict[str, Any]) -> None:
    target = make_checkpoint(tmp_path / "target", "llama", vocab_size=320)
    draft = make_checkpoint(tmp_path / "draft", "qwen3", seed=5, vocab_size=320, changes={"num_hidden_layers": 1})
    plain = said(built(target, **settings))
    engine = built(target, speculative_config=draft_config(draft), **settings)
    assert_same(plain, said(engine), is_exact="batch_invariant" in settings)
    num_drafts, num_accepted = counts_of(engine)
    assert num_drafts > 100
    assert num_accepted < 0.2 * num_drafts


def test_ranks_of_one_pool_have_a_draft_on_the_first(tmp_path: Path) -> None:
    make_model(tmp_path, "llama")
    plain = said(built(tmp_path))
    values: dict[str, Any] = {**SIZES, "rank_pools": SHARED, "speculative_config": draft_config(tmp_path)}
    engine, executor = thread_ranks.built(tmp_path, 2, 1, **values)
    assert engine.memory.layout.num_layers == 4
    assert_same(plain, said(engine), is_exact=False)
    executor.close()
    num_drafts, num_accepted = counts_of(engine)
    assert num_accepted > 0.9 * num_drafts > 90


def handed_over(tmp_path: Path, *, waits: bool) -> tuple[list[int], Engine, Engine]:
    """What a request says that one engine begins and another goes on with, and both. `waits`: somebody waits for the
    first."""
    settings: dict[str, Any] = {"speculative_config": draft_config(tmp_path), "max_num_batched_tokens": 8}
    first, second = (built(tmp_path, **settings) for _ in range(2))
    prompt, key = Prompt.of(PROMPT_IDS), key_of(1)
    params = DecodingParams(temperature=1.0, seed=7, max_tokens=NUM_OUTPUT)
    reservation = second.core.handoffs.reserve(key, prompt)
    assert reservation is not None
    first.core.add(key, prompt, params, first_token_only=True)
    if waits:
        for number in range(2, 40):
            first.core.add(key_of(number), Prompt.of([number] * 30), params, first_token_only=True)
    told: list[int] = []
    tokens: list[int] = []
    while not tokens:
        told.append(0)

        def count(_: int = len(told) - 1) -> None:
            told[_] += 1

        for output in first.core.step(lambda step, count=count: count):  # type: ignore[misc]
            tokens += output.token_ids if output.key == key else ()
    assert set(told) == {first.memory.layout.num_layers}
    table = first.core.handoffs.block_table(key)
    sent, come = first.memory.blocks, second.memory.blocks
    assert isinstance(sent, np.ndarray)
    assert isinstance(come, np.ndarray)
    come[list(reservation.block_table)] = sent[list(table)]
    num_drafted = first.core.handoffs.num_drafted(table)
    assert num_drafted == (0 if waits else len(PROMPT_IDS))
    second.core.handoffs.add_reserved(reservation, prompt, [FirstToken(key, params, tokens[0])], (), num_drafted)
    while second.core.has_work:
        for output in second.core.step():
            tokens += output.token_ids
        second.core.check()
    return tokens, first, second


@pytest.mark.parametrize("waits", [False, True], ids=["computed beside", "left to the other"])
def test_the_drafts_kv_of_a_prompt_comes_with_it_unless_somebody_waits(tmp_path: Path, waits: bool) -> None:
    make_model(tmp_path, "llama")
    plain = built(tmp_path).core
    plain.add(key_of(1), Prompt.of(PROMPT_IDS), DecodingParams(temperature=1.0, seed=7, max_tokens=NUM_OUTPUT))
    expected = [token for _ in range(60) if plain.has_work for output in plain.step() for token in output.token_ids]
    with mock.patch.object(DraftPasses, "compute", autospec=True, side_effect=DraftPasses.compute) as computed:
        tokens, _, second = handed_over(tmp_path, waits=waits)
    assert tokens == expected
    num_drafts, num_accepted = counts_of(second)
    assert num_accepted == num_drafts > 10
    seen = sum(share.num_tokens for call in computed.call_args_list for share in call.args[1] if share.start < 30)
    assert (seen >= len(PROMPT_IDS)) == waits


def streams(
    engine: Engine, prompts: Sequence[tuple[Sequence[RequestKey], Sequence[int]]]
) -> dict[RequestKey, list[int]]:
    """What each key says, of prompts with one choice or more."""
    found: dict[RequestKey, list[int]] = {}
    for (key, *forks), prompt in prompts:
        found |= {each: [] for each in (key, *forks)}
        params = DecodingParams(temperature=1.0, seed=11, max_tokens=NUM_OUTPUT)
        engine.core.add(key, Prompt.of(prompt), params, forks=forks)
    while engine.core.has_work:
        for output in engine.core.step():
            found[output.key] += output.token_ids
        engine.core.check()
    return found


def test_choices_of_one_prompt_have_drafts_of_their_own(tmp_path: Path) -> None:
    make_model(tmp_path, "llama")
    choices = [([key_of(1), key_of(2), key_of(3)], PROMPT_IDS)]
    plain = streams(built(tmp_path), choices)
    assert len({tuple(each) for each in plain.values()}) == 3
    engine = built(tmp_path, speculative_config=draft_config(tmp_path))
    assert streams(engine, choices) == plain
    num_drafts, num_accepted = counts_of(engine)
    assert num_accepted == num_drafts > 30


def test_a_prefix_that_is_found_again_has_its_draft_kv(tmp_path: Path) -> None:
    """Only what is new is caught up with, and the drafts are as good."""
    make_model(tmp_path, "llama")
    engine = built(tmp_path, speculative_config=draft_config(tmp_path))
    plain = built(tmp_path)
    turns = [PROMPT_IDS, [*PROMPT_IDS, *range(9)]]
    for number, prompt in enumerate(turns):
        asked = [([key_of(number)], prompt)]
        with mock.patch.object(DraftPasses, "compute", autospec=True, side_effect=DraftPasses.compute) as computed:
            assert streams(engine, asked) == streams(plain, asked)
        starts = [share.start for call in computed.call_args_list for share in call.args[1]]
        assert min(starts) == (0, len(PROMPT_IDS) // 4 * 4)[number]
    num_drafts, num_accepted = counts_of(engine)
    assert num_accepted == num_drafts > 20


def test_a_users_text_is_the_same_with_a_draft_model(tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target", "llama")
    params = [SamplingParams(temperature=each, seed=3, max_tokens=40, logprobs=2) for each in (0.0, 0.8)]
    found = [
        LLM(str(target), num_threads=1, num_blocks=64, batch_invariant=True, speculative_config=config).generate(
            ["The river said that", "1 + 1 = 2"], params
        )
        for config in ("", draft_config(target, quantization="int8"))
    ]
    assert found[0] == found[1]


def test_a_draft_that_fails_ends_drafts_and_no_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_model(tmp_path, "llama")
    plain = streams(built(tmp_path), [([key_of(1)], PROMPT_IDS)])
    engine = built(tmp_path, speculative_config=draft_config(tmp_path))
    with mock.patch.object(DraftPasses, "compute", side_effect=MemoryError("no room")) as computed:
        assert streams(engine, [([key_of(1)], PROMPT_IDS)]) == plain
    assert computed.call_count == 1
    assert "drafts come from text alone from now on: draft_model could not be computed" in caplog.text


def test_long_prompts_are_caught_up_with_over_several_steps(tmp_path: Path) -> None:
    make_model(tmp_path, "llama")
    prompts = [([key_of(number)], [(number * place) % 150 for place in range(1, 100)]) for number in range(1, 3)]
    engine = built(tmp_path, speculative_config=draft_config(tmp_path))
    with mock.patch.object(DraftPasses, "compute", autospec=True, side_effect=DraftPasses.compute) as computed:
        assert streams(engine, prompts) == streams(built(tmp_path), prompts)
    sizes = [sum(share.num_tokens for share in call.args[1]) for call in computed.call_args_list]
    assert 32 < max(sizes) <= 32 + 5
    assert counts_of(engine)[1] > 10


def test_requests_of_stages_are_counted_as_those_without_drafts(tmp_path: Path) -> None:
    make_model(tmp_path, "llama")
    values: dict[str, Any] = {**SIZES, "rank_pools": SHARED, "speculative_config": draft_config(tmp_path)}
    engine, executor = thread_ranks.built(tmp_path, 1, 2, **values)
    assert streams(engine, [([key_of(1)], PROMPT_IDS)]) == streams(built(tmp_path), [([key_of(1)], PROMPT_IDS)])
    executor.close()
    assert engine.core.draft_counts.undrafted == {"stages": 1}
    assert {counts.method for counts in engine.core.draft_counts.by_method()} <= {"suffix"}


def test_tokens_that_are_drawn_by_a_race_depend_on_no_draft_and_are_guessed_more_often(tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target", "llama")
    other = make_checkpoint(tmp_path / "other", "qwen3", seed=5)
    found, counts = [], []
    drafts: list[tuple[Path, dict[str, Any]]] = [
        (target, {"rejection_sample_method": "standard"}),
        (other, {"rejection_sample_method": "standard"}),
        (target, {"rejection_sample_method": "standard", "quantization": "int4"}),
        (target, {"quantization": "int4"}),
    ]
    for draft, values in drafts:
        engine = built(target, batch_invariant=True, speculative_config=draft_config(draft, **values))
        found.append(said(engine))
        counts.append(counts_of(engine))
    for each in found[1:3]:
        assert_same(found[0], each, is_exact=True)
    shares = [num_accepted / num_drafts for num_drafts, num_accepted in counts]
    assert shares[0] > 0.97
    assert shares[1] < 0.3
    assert shares[2] > 1.2 * shares[3]
