"""Heads in whole engines: ids and log probabilities are those of decoding without them, and what a head needs of a
prompt goes wherever its KV goes."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from baton.engine.build import Engine
from baton.engine.handoffs import FirstToken
from baton.engine.models.weight_files import SINGLE_FILE
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.settings import SHARED
from baton.engine.speculation.heads.proposer import HeadProposer
from baton.wire.errors import ModelLoadError
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams
from tests.checkpoints import make_checkpoint
from tests.engine.models.families import make_model
from tests.engine.models.heads.described import Described
from tests.engine.models.heads.published import add_mtp, make_eagle3
from tests.engine.scheduler.all_drafts import AllDrafts
from tests.engine.speculation.heads.right_head import config_of, make_predictable, make_right_head
from tests.engine.test_drafts import NUM_OUTPUT, SIZES, assert_same, built, said
from tests.ranks.executor import thread_ranks
from tests.request_keys import key_of

PROMPT_IDS = [(7 * number) % 150 for number in range(30)]
MTP = json.dumps({"method": "mtp", "num_speculative_tokens": 3})
GREEDY = DecodingParams(temperature=0.0, max_tokens=NUM_OUTPUT)


@dataclass
class Told:
    """The drafts of each proposer, by how many tokens their request had."""

    drafts: dict[int, tuple[list[int], list[float]]] = field(default_factory=dict)

    def take(self) -> dict[int, tuple[list[int], list[float]]]:
        """Those since the last call."""
        found, self.drafts = self.drafts, {}
        return found


@pytest.fixture(autouse=True)
def _verify_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many drafts pay is a question of time."""
    monkeypatch.setattr("baton.engine.speculation.building.DraftDepth", AllDrafts)
    monkeypatch.setattr("baton.engine.speculation.text_first._SURE", 2.0)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    found, propose = Told(), HeadProposer.propose

    def noted(self: HeadProposer, wanted: Any) -> Any:
        drafts = propose(self, wanted)
        for each, draft in zip(wanted, drafts, strict=True):
            if draft.token_ids:
                found.drafts[len(each.request.token_ids)] = (list(draft.token_ids), list(draft.confidences))
        return drafts

    monkeypatch.setattr(HeadProposer, "propose", noted)
    return found


def counts_of(engine: Engine) -> tuple[int, int]:
    """Tokens that were guessed, and those of them that were right."""
    (counts,) = engine.core.draft_counts.by_method()
    return sum(counts.tokens_by_position), sum(counts.accepted_by_position)


def bytes_of(engine: Engine, block: int) -> bytes:
    return np.asarray(engine.memory.blocks[block]).tobytes()


def outputs_of(engine: Engine, number: int = 1) -> list[int]:
    """The output of the one request that the engine has."""
    found: list[int] = []
    while engine.core.has_work:
        for output in engine.core.step():
            engine.core.check()
            assert output.key == key_of(number)
            found += output.token_ids
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {"batch_invariant": True},
        {"cpu_kernels": "torch"},
        {"kv_cache_dtype": "fp8"},
        {"quantization": "int8"},
        {"num_blocks": 26, "enable_prefix_caching": False},
        {"num_blocks": 26, "kv_offloading_size": 0.01},
        {"device": "emulated"},
        {"device": "emulated", "enforce_eager": True},
    ],
    ids=["native", "torch", "fp8", "int8", "preempted", "tiers", "graphs", "asynchronous"],
)
def test_a_head_that_knows_its_model_is_right_and_changes_nothing(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = make_predictable(tmp_path / "model")
    head = make_right_head(tmp_path / "head", model)
    plain = said(built(model, **settings))
    engine = built(model, speculative_config=config_of(head), **settings)
    found = said(engine)
    assert_same(plain, found, is_exact="batch_invariant" in settings)
    num_drafts, num_accepted = counts_of(engine)
    assert num_accepted > 0.5 * num_drafts > 50


def test_choices_of_one_prompt_have_drafts_of_their_own(tmp_path: Path) -> None:
    model = make_predictable(tmp_path / "model")
    head = make_right_head(tmp_path / "head", model)
    params = DecodingParams(temperature=1.5, seed=3, max_tokens=NUM_OUTPUT)
    keys, found = [key_of(number) for number in range(3)], []
    engines = [built(model), built(model, speculative_config=config_of(head))]
    for engine in engines:
        engine.core.add(keys[0], Prompt.of(PROMPT_IDS), params, forks=keys[1:])
        outputs: dict[RequestKey, list[int]] = {key: [] for key in keys}
        while engine.core.has_work:
            for output in engine.core.step():
                engine.core.check()
                outputs[output.key] += output.token_ids
        found.append(outputs)
    assert found[0] == found[1]
    assert all(len(output) == NUM_OUTPUT for output in found[0].values())
    assert counts_of(engines[1])[1] > NUM_OUTPUT


@pytest.mark.parametrize("settings", [{"batch_invariant": True}, {"num_blocks": 26}], ids=["native", "preempted"])
def test_a_head_that_knows_nothing_changes_nothing(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = make_checkpoint(tmp_path / "model", "llama", changes={"num_hidden_layers": 4})
    make_eagle3(tmp_path / "head", model, num_rows=90)
    plain = said(built(model, **settings))
    engine = built(model, speculative_config=config_of(tmp_path / "head"), **settings)
    assert_same(plain, said(engine), is_exact="batch_invariant" in settings)
    num_drafts, num_accepted = counts_of(engine)
    assert num_drafts > 100
    assert num_accepted < 0.2 * num_drafts


@pytest.mark.parametrize(
    ("family", "method"),
    [
        ("deepseek-v3", "deepseek_mtp"),
        ("glm4-moe", "glm4_moe_mtp"),
        ("qwen3-next", "qwen3_next_mtp"),
        ("qwen3-next", "mtp"),
    ],
)
def test_layers_for_further_tokens_change_nothing(tmp_path: Path, family: str, method: str) -> None:
    """Latents, experts, and states that go back behind a wrong draft."""
    make_model(tmp_path, family)
    plain = said(built(tmp_path))
    add_mtp(tmp_path, 1)
    engine = built(tmp_path, speculative_config=json.dumps({"method": method, "num_speculative_tokens": 3}))
    assert_same(plain, said(engine), is_exact=False)
    assert counts_of(engine)[0] > 100
    assert engine.fingerprint.endswith("+draft-mtp")


@torch.inference_mode()
@pytest.mark.parametrize(("is_right", "first_token_only"), [(False, False), (False, True), (True, False), (True, True)])
def test_each_draft_is_that_of_the_description(
    tmp_path: Path, told: Told, is_right: bool, first_token_only: bool
) -> None:
    """Behind a prompt in chunks, here or elsewhere, and behind drafts that were right or wrong: the guesses at each
    length are those of the head computed anew over all hidden states and tokens, with the chances that it gives
    them."""
    pair, prompt = Pair(tmp_path, is_right=is_right), Prompt.of(PROMPT_IDS)
    target = pair.engine()
    if first_token_only:
        source = pair.engine()
        output = gone_on(source, target, prompt, begun(source, prompt))
    else:
        target.core.add(key_of(1), prompt, GREEDY)
        output = outputs_of(target)
    tensors = load_file(tmp_path / "head" / SINGLE_FILE)
    model = AutoModelForCausalLM.from_pretrained(pair.model, dtype=torch.float32, attn_implementation="eager")
    described = Described(tensors, model.get_input_embeddings().weight)
    described.adds_to_normed = is_right
    known = torch.arange(320) if is_right else tensors["t2d"].nonzero()[:, 0]
    ids = torch.tensor([*PROMPT_IDS, *output])
    streams = model(ids[None], output_hidden_states=True).hidden_states
    fused = torch.cat([streams[tap][0] for tap in (1, 2, 2)], dim=1) @ described.matrix("fc")
    drafts = told.take()
    assert len(drafts) > (3 if is_right else NUM_OUTPUT - 6)
    for length, (token_ids, confidences) in drafts.items():
        hidden, tokens = fused[: length - 1], ids[1:length]
        for token_id, confidence in zip(token_ids, confidences, strict=True):
            states = described.states(hidden, tokens)
            chances = described.logits(states[-1:])[0].softmax(-1)
            assert known[chances.argmax()] == token_id, length
            assert confidence == pytest.approx(float(chances.max()), rel=1e-3)
            hidden, tokens = torch.cat((hidden, states[-1:])), torch.cat((tokens, torch.tensor([token_id])))


class Pair:
    """Engines of one model and one head, which hand over a prompt to each other."""

    def __init__(self, folder: Path, *, is_right: bool = False, **settings: Any) -> None:
        if is_right:
            self.model = make_predictable(folder / "model")
            make_right_head(folder / "head", self.model)
        else:
            self.model = make_checkpoint(folder / "model", "llama", changes={"num_hidden_layers": 4})
            make_eagle3(folder / "head", self.model, num_rows=90)
        self.settings = {"speculative_config": config_of(folder / "head"), "max_num_batched_tokens": 8, **settings}

    def engine(self, **settings: Any) -> Engine:
        return built(self.model, **{**self.settings, **settings})


def begun(engine: Engine, prompt: Prompt) -> int:
    """The first token, computed for another engine. Each step tells of all layers, the head's too."""
    told: list[int] = []
    engine.core.add(key_of(1), prompt, GREEDY, first_token_only=True)
    while True:
        told.append(0)

        def count(number: int = len(told) - 1) -> None:
            told[number] += 1

        for output in engine.core.step(lambda step, count=count: count):  # type: ignore[misc]
            if output.token_ids:
                assert set(told) == {engine.memory.layout.num_layers}
                return output.token_ids[0]


def gone_on(source: Engine, target: Engine, prompt: Prompt, token_id: int, *, layers: int = 5) -> list[int]:
    """The output of a prompt that `source` has computed, of which so many layers came to `target`."""
    reservation = target.core.handoffs.reserve(key_of(1), prompt)
    assert reservation is not None
    sent, end = list(source.core.handoffs.block_table(key_of(1))), source.memory.layout.layer_ends[layers - 1]
    target.memory.blocks[list(reservation.block_table), :end] = source.memory.blocks[sent, :end]  # type: ignore[assignment]
    source.core.handoffs.release(key_of(1))
    target.core.handoffs.add_reserved(reservation, prompt, [FirstToken(key_of(1), GREEDY, token_id)])
    return [token_id, *outputs_of(target)]


def test_drafts_after_a_handoff_are_those_of_one_engine(tmp_path: Path, told: Told) -> None:
    """The head's KV of the prompt came with the model's, the slot of its last token too; without it they differ."""
    pair, prompt = Pair(tmp_path), Prompt.of(PROMPT_IDS)
    alone = pair.engine()
    alone.core.add(key_of(1), prompt, GREEDY)
    plain = outputs_of(alone)
    expected = told.take()
    assert min(expected) == len(PROMPT_IDS) + 1
    for layers in (5, 4):
        source, target = pair.engine(), pair.engine()
        token_id = begun(source, prompt)
        assert gone_on(source, target, prompt, token_id, layers=layers) == plain
        found = told.take()
        # the hidden state of the prompt's last token has stayed behind
        assert min(found) == len(PROMPT_IDS) + 2
        assert len(found) > NUM_OUTPUT - 6
        assert (found == {length: expected[length] for length in found}) == (layers == 5)


@pytest.mark.parametrize("family", ["deepseek-v3", "qwen3-next"])
def test_layers_for_further_tokens_are_handed_over(tmp_path: Path, told: Told, family: str) -> None:
    """Beside latents, and beside states."""
    make_model(tmp_path, family)
    add_mtp(tmp_path, 1)
    prompt = Prompt.of(PROMPT_IDS)
    alone, source, target = (built(tmp_path, speculative_config=MTP, max_num_batched_tokens=8) for _ in range(3))
    alone.core.add(key_of(1), prompt, GREEDY)
    plain, expected = outputs_of(alone), told.take()
    token_id = begun(source, prompt)
    assert gone_on(source, target, prompt, token_id, layers=source.memory.layout.num_layers) == plain
    found = told.take()
    assert len(found) > NUM_OUTPUT - 8
    for length, (token_ids, confidences) in found.items():
        if length in expected:
            assert expected[length][0] == token_ids
            assert expected[length][1] == pytest.approx(confidences, rel=1e-3)


def test_steps_without_a_prompt_tell_of_all_layers_too(tmp_path: Path) -> None:
    engine, told = Pair(tmp_path).engine(), []
    engine.core.add(key_of(1), Prompt.of(PROMPT_IDS[:5]), GREEDY)
    num_steps = 0
    while engine.core.has_work:
        engine.core.step(lambda step: lambda: told.append(step))
        num_steps += 1
    assert engine.memory.layout.num_layers == 5
    assert len(told) == 5 * num_steps > 5 * NUM_OUTPUT // 2


def test_no_graphs_are_recorded_of_steps_that_a_head_reads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = mock.Mock(return_value=0)
    monkeypatch.setattr(ModelRunner, "record_graphs", record)
    pair = Pair(tmp_path)
    pair.engine(device="emulated")
    assert not record.called
    assert "steps are not recorded, and take longer: a head reads what is between layers" in caplog.text
    pair.engine(device="emulated", speculative_config="")
    assert record.called


def test_drafts_behind_a_prompt_that_is_computed_again_are_the_same(tmp_path: Path, told: Told) -> None:
    """As after the death of the node that generated it."""
    pair, prompt = Pair(tmp_path), Prompt.of(PROMPT_IDS)
    alone, other = pair.engine(), pair.engine()
    alone.core.add(key_of(1), prompt, GREEDY)
    plain, expected = outputs_of(alone), told.take()
    other.core.add(key_of(1), prompt, GREEDY, output_ids=plain[:7])
    assert outputs_of(other) == plain[7:]
    found = told.take()
    assert min(found) == len(PROMPT_IDS) + 8
    assert found == {length: expected[length] for length in found}


def test_a_prefix_that_is_found_has_the_slots_of_the_head(tmp_path: Path, told: Told) -> None:
    """A prompt that goes on behind another request's output: the slots of prompt and output are there, and the
    last one was made with the same token."""
    pair = Pair(tmp_path)
    engine, fresh = pair.engine(), pair.engine()
    engine.core.add(key_of(1), Prompt.of(PROMPT_IDS), GREEDY)
    longer = Prompt.of([*PROMPT_IDS, *outputs_of(engine)[:19], 5, 6])
    told.take()
    fresh.core.add(key_of(1), longer, GREEDY)
    plain, expected = outputs_of(fresh), told.take()
    engine.core.add(key_of(1), longer, GREEDY)
    (output,) = engine.core.step()
    assert output.num_cached_tokens == 48
    assert [*output.token_ids, *outputs_of(engine)] == plain
    assert told.take() == expected


def test_a_head_that_fails_costs_no_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pair, prompt = Pair(tmp_path), Prompt.of(PROMPT_IDS)
    plain, engine = pair.engine(speculative_config=""), pair.engine()
    for each in (plain, engine):
        each.core.add(key_of(1), prompt, GREEDY)
    with mock.patch.object(HeadProposer, "_guess", side_effect=RuntimeError("it is broken")):
        assert outputs_of(engine) == outputs_of(plain)
    assert caplog.text.count("drafts come from text alone from now on: eagle3 could not be computed") == 1


def test_blocks_that_another_node_copies_are_not_written(tmp_path: Path, told: Told) -> None:
    """While a stream goes on, its full blocks may be on their way elsewhere: their checksums have to stay."""
    pair, prompt = Pair(tmp_path), Prompt.of(PROMPT_IDS)
    engine = pair.engine()
    engine.core.add(key_of(1), prompt, GREEDY)
    copied: dict[int, bytes] = {}
    for number in range(2, 99):
        if not engine.core.has_work:
            break
        engine.core.step()
        engine.core.check()
        assert all(bytes_of(engine, block) == content for block, content in copied.items())
        handed = engine.core.handoffs.hand_over(key_of(1), key_of(number), goes_on=True)
        if handed is not None:
            copied |= {block: bytes_of(engine, block) for block in handed.block_table}
    assert len(copied) >= (len(PROMPT_IDS) + NUM_OUTPUT) // 4 - 1
    assert len(told.take()) > NUM_OUTPUT // 2


def test_slots_of_steps_that_nobody_followed_are_filled(tmp_path: Path, told: Told) -> None:
    """A request that rests goes on without the head. Drafts behind that are not those without a rest, and drafts all
    the same; a step's hidden states are needed first."""
    pair, prompt = Pair(tmp_path), Prompt.of(PROMPT_IDS)
    engine = pair.engine()
    engine.core.add(key_of(1), prompt, GREEDY)
    plain = outputs_of(engine)
    told.take()
    resting = range(len(PROMPT_IDS) + 5, len(PROMPT_IDS) + 12)
    follows = HeadProposer.follows
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            HeadProposer,
            "follows",
            lambda self, request: len(request.token_ids) not in resting and follows(self, request),
        )
        other = pair.engine()
        other.core.add(key_of(1), prompt, GREEDY)
        assert outputs_of(other) == plain
    found = told.take()
    assert not any(length in found for length in resting)
    assert min(length for length in found if length > resting[0]) <= resting[-1] + 2


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"model_impl": "transformers"}, "transformers computes this model"),
        ({"load_format": "dummy"}, "a head for random weights guesses nothing"),
    ],
)
def test_where_a_head_cannot_be_the_model_goes_on_without_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, settings: dict[str, Any], reason: str
) -> None:
    make_model(tmp_path / "model", "llama")
    make_eagle3(tmp_path / "head", tmp_path / "model", changes={"eagle_aux_hidden_state_layer_ids": [0, 1, 2]})
    with caplog.at_level(logging.WARNING):
        engine = built(tmp_path / "model", speculative_config=config_of(tmp_path / "head"), **settings)
    assert f"drafts come from text alone: {reason}" in caplog.text
    engine.core.add(key_of(1), Prompt.of(PROMPT_IDS), GREEDY)
    assert len(outputs_of(engine)) == NUM_OUTPUT
    assert {counts.method for counts in engine.core.draft_counts.by_method()} <= {"suffix"}


def test_ranks_go_on_without_a_head(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        make_model(tmp_path / "llama", "llama")
        make_eagle3(tmp_path / "head", tmp_path / "llama", changes={"eagle_aux_hidden_state_layer_ids": [0, 1, 2]})
        config = config_of(tmp_path / "head")
        values: dict[str, Any] = {**SIZES, "rank_pools": SHARED, "speculative_config": config}
        engine, executor = thread_ranks.built(tmp_path / "llama", 2, 1, **values)
        assert "a head reads hidden states of a whole model" in caplog.text
    assert_same(said(built(tmp_path / "llama")), said(engine), is_exact=False)
    executor.close()


def test_a_head_that_does_not_fit_keeps_the_node_from_starting(tmp_path: Path) -> None:
    """Before weights are read."""
    make_model(tmp_path, "llama")
    with pytest.raises(ModelLoadError, match="LlamaForCausalLM has no layers that predict further tokens"):
        built(tmp_path, speculative_config=MTP)
