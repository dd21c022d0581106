"""Drafts through whole engines with real models: ids and log probabilities are those of decoding without them."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from baton import LLM, SamplingParams
from baton.engine.build import Engine, build_engine
from baton.engine.core import EngineCore
from baton.engine.handoffs import FirstToken
from baton.engine.runner.kv_memory import allocate_private
from baton.engine.scheduler.proposer import Proposer
from baton.engine.scheduler.request import Request
from baton.engine.scheduler.step import RequestOutput, SampledToken
from baton.engine.settings import OWN, SHARED, EngineSettings
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams
from tests.checkpoints import make_checkpoint
from tests.engine.models.adapters.adapter_folders import write_adapter
from tests.engine.models.families import VOCAB_SIZE, make_model
from tests.engine.models.image_files import picture
from tests.engine.models.seeing import make_seeing
from tests.engine.models.test_images import Composed
from tests.engine.scheduler.all_drafts import AllDrafts
from tests.engine.scheduler.proposers import Guessing
from tests.engine.structured.answers import GRAMMARS
from tests.engine.structured.test_jumping import VARIANTS as VARIANTS_IN_GRAMMARS
from tests.ranks.executor import thread_ranks
from tests.request_keys import key_of

VARIANTS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 1.3, "seed": 4, "top_p": 0.8, "logprobs": 0},
    {"temperature": 0.9, "seed": 5, "top_k": 12, "min_p": 0.02},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 1.0, "seed": 6, "presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    {"temperature": 0.0, "bad_word_ids": ((7,), (20, 21)), "logit_bias_ids": (5, 6), "logit_bias_values": (2.0, 1.0)},
    {"temperature": 1.0, "seed": 7, "allowed_token_ids": tuple(range(0, VOCAB_SIZE, 3)), "min_tokens": 9},
    {"temperature": 1.0, "seed": 8, "stop_token_ids": tuple(range(0, VOCAB_SIZE, 15))},
]
NUM_OUTPUT = 24
PROMPT = "Stations, relations and foundations: the motion of the nation is a notion. " * 2
SIZES = {
    "num_threads": 1,
    "num_blocks": 96,
    "block_size": 4,
    "max_num_seqs": 24,
    "max_num_batched_tokens": 32,
    "speculative_config": "none",
}


@dataclass
class Followed:
    """What `engine` has said to each request that it has had."""

    tokens: dict[RequestKey, list[SampledToken]] = field(default_factory=dict)
    reasons: dict[RequestKey, str] = field(default_factory=dict)
    num_steps: int = 0

    def following(self, request: Request, count: int) -> Sequence[int]:
        """What comes next when it is said again."""
        ids = [token.token_id for token in self.tokens.get(request.key, ())]
        first = len(request.token_ids) - request.num_prompt_tokens
        return ids[first : first + count]

    def note(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            assert not output.has_failed or output.failure
            tokens = self.tokens.setdefault(output.key, [])
            tokens += output.tokens
            if output.has_left:
                self.reasons[output.key] = output.finish_reason or output.failure


def built(
    folder: Path, proposer: Proposer | None = None, adapters: Mapping[str, Path] | None = None, **settings: object
) -> Engine:
    chosen = EngineSettings(model=str(folder), **{**SIZES, **settings})  # type: ignore[arg-type]
    return build_engine(chosen, allocate_private, proposer=proposer, adapters=adapters)


def said(engine: Engine, variants: Sequence[Mapping[str, Any]] = VARIANTS) -> Followed:
    """The outputs of a request of each variant, and of some more choices. Some come while others decode, in chunks."""
    found, chance = Followed(), random.Random(5)
    waiting = list(enumerate(variants))
    adapters = [b"", *engine.adapters.values()]
    while waiting or engine.core.has_work:
        for number, variant in waiting[:3]:
            prompt = [chance.randrange(VOCAB_SIZE) for _ in range(3 + 7 * (number % 10))]
            params = DecodingParams(**{"max_tokens": NUM_OUTPUT, **variant})
            keys = [key_of(number), *([key_of(f"{number}.1"), key_of(f"{number}.2")] if number % 4 == 2 else [])]
            adapter = adapters[number % len(adapters)]
            engine.core.add(keys[0], Prompt.of(prompt, adapter=adapter), params, forks=keys[1:])
            found.tokens |= {key: [] for key in keys}
        del waiting[:3]
        outputs = engine.core.step()
        engine.core.check()
        found.num_steps += 1
        assert all(output.output_index == len(found.tokens[output.key]) for output in outputs)
        found.note(outputs)
    return found


def driven(engine: Engine, found: Followed, *request: Any) -> None:
    """To the end, with one more `request` if there is one."""
    if request:
        engine.core.add(*request)
    while engine.core.has_work:
        found.note(engine.core.step())
        engine.core.check()


def assert_same(plain: Followed, found: Followed, *, is_exact: bool) -> None:
    assert found.reasons == plain.reasons
    for key, tokens in plain.tokens.items():
        others = found.tokens[key]
        assert [token.token_id for token in others] == [token.token_id for token in tokens]
        for token, other in zip(tokens, others, strict=True):
            if is_exact or token.logprobs is None:
                assert other == token
            else:
                assert other.logprobs is not None
                assert other.logprobs.logprob == pytest.approx(token.logprobs.logprob, abs=1e-4)
                assert other.logprobs.top_ids == token.logprobs.top_ids


@pytest.mark.parametrize("share_right", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_outputs_are_those_of_decoding_without_drafts_bit_for_bit(
    tmp_path: Path, family: str, share_right: float
) -> None:
    """In models whose numbers are promised to depend on no batch. The second has a short window."""
    make_model(tmp_path, family)
    plain = said(built(tmp_path, batch_invariant=True))
    proposer = Guessing(plain.following, share_right, most=5)
    drafted = said(built(tmp_path, proposer, batch_invariant=True))
    assert_same(plain, drafted, is_exact=True)
    assert proposer.num_drafts > 50
    assert (proposer.num_accepted > 0) == (share_right > 0)
    if share_right == 1.0:
        assert proposer.num_accepted == proposer.num_drafts
        assert drafted.num_steps < 0.7 * plain.num_steps


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"cpu_kernels": "torch"}),
        ("llama", {"kv_cache_dtype": "fp8"}),
        ("llama", {"quantization": "int8", "batch_invariant": True}),
        ("mistral", {"quantization": "int4", "batch_invariant": True}),
        ("llama", {"dtype": "bfloat16", "batch_invariant": True}),
        ("llama", {"num_blocks": 26, "enable_prefix_caching": False, "batch_invariant": True}),
        ("llama", {"device": "emulated"}),
        ("llama", {"device": "emulated", "enforce_eager": True}),
        ("gemma2", {}),
        ("gpt-oss", {}),
        ("qwen3-moe", {}),
        ("deepseek-v3", {}),
        ("gpt2", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())) or "default",
)
def test_drafts_are_verified_on_every_path(tmp_path: Path, family: str, settings: dict[str, Any]) -> None:
    """Caps of scores, sinks, experts and latents among them."""
    make_model(tmp_path, family)
    plain = said(built(tmp_path, **settings))
    proposer = Guessing(plain.following, 0.7, most=5)
    drafted = said(built(tmp_path, proposer, **settings))
    assert_same(plain, drafted, is_exact=settings.get("batch_invariant", False))
    assert 50 < proposer.num_accepted < proposer.num_drafts


@pytest.mark.parametrize("family", ["qwen3-vl", "mistral3"])
def test_requests_with_images_verify_drafts(tmp_path: Path, family: str) -> None:
    seeing = make_seeing(tmp_path, family)
    prompts = [Composed(seeing).text(9, seed).image(picture(100, 60, seed)).text(5, seed) for seed in (1, 2)]
    params = DecodingParams(temperature=0.0, max_tokens=NUM_OUTPUT, logprobs=2, ignore_eos=True)
    proposer, found = None, list[Followed]()
    for _ in range(2):
        engine, each = built(tmp_path, proposer, num_blocks=128), Followed()
        for number, prompt in enumerate(prompts):
            engine.core.add(key_of(number), Prompt.of(prompt.ids, media=prompt.images), params)
        driven(engine, each, key_of("text"), Prompt.of(range(20)), params)
        found.append(each)
        proposer = proposer or Guessing(each.following, 0.7, most=5)
    assert_same(*found, is_exact=False)
    assert proposer is not None
    assert 30 < proposer.num_accepted < proposer.num_drafts


def test_requests_of_adapters_verify_drafts(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "base", "llama")
    adapters = {name: write_adapter(tmp_path / name, folder, seed=seed) for name, seed in (("one", 1), ("two", 2))}
    plain = said(built(folder, adapters=adapters))
    proposer = Guessing(plain.following, 0.7, most=5)
    assert_same(plain, said(built(folder, proposer, adapters)), is_exact=False)
    assert 50 < proposer.num_accepted < proposer.num_drafts


@pytest.mark.parametrize(("size", "num_stages", "pools"), [(2, 1, SHARED), (1, 2, SHARED), (2, 2, OWN)])
def test_ranks_and_stages_verify_drafts(tmp_path: Path, size: int, num_stages: int, pools: str) -> None:
    make_checkpoint(tmp_path, "qwen2")
    in_grammars = [
        {"grammar": grammar, **variant} for grammar, _ in GRAMMARS.values() for variant in VARIANTS_IN_GRAMMARS[:2]
    ]
    variants = [*VARIANTS, *in_grammars]
    plain = said(built(tmp_path), variants)
    proposer = Guessing(plain.following, 0.7, most=5)
    values: dict[str, Any] = {**SIZES, "rank_pools": pools}
    engine, executor = thread_ranks.built(tmp_path, size, num_stages, proposer=proposer, **values)
    assert_same(plain, said(engine, variants), is_exact=False)
    executor.close()
    assert 50 < proposer.num_accepted < proposer.num_drafts


@pytest.mark.parametrize(("device", "share_right"), [("cpu", 0.7), ("cpu", 1.0), ("emulated", 0.7)])
def test_answers_in_a_grammar_are_those_of_decoding_without_drafts(
    tmp_path: Path, device: str, share_right: float
) -> None:
    """With everything else that may be asked for beside it, and forced tokens between the drafts on a host."""
    make_checkpoint(tmp_path, "qwen2")
    variants = [
        {"max_tokens": 40, "grammar": grammar, **variant}
        for grammar, _ in GRAMMARS.values()
        for variant in (
            *VARIANTS_IN_GRAMMARS,
            {"temperature": 1.0, "seed": 8, "ignore_eos": True, "logprobs": 2},
            {"temperature": 1.4, "seed": 9, "allowed_token_ids": tuple(range(4, 290))},
        )
    ]
    sizes = {"num_blocks": 320, "block_size": 8, "max_num_seqs": 64}
    settings: dict[str, Any] = {**sizes, "device": device, "batch_invariant": device == "cpu"}
    plain = said(built(tmp_path, **settings), variants)
    proposer = Guessing(plain.following, share_right, most=5)
    drafted = said(built(tmp_path, proposer, **settings), variants)
    assert_same(plain, drafted, is_exact=device == "cpu")
    assert proposer.num_accepted > 150
    assert (proposer.num_accepted < proposer.num_drafts) == (share_right < 1.0)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "asked",
    [
        {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1},
        {"method": "suffix", "num_speculative_tokens": 4},
    ],
    ids=["ngram", "suffix"],
)
def test_a_user_who_asks_for_drafts_from_text_gets_the_same_in_fewer_steps(
    tmp_path: Path, temperature: float, asked: dict[str, Any]
) -> None:
    folder, found, num_steps = make_checkpoint(tmp_path, "llama"), [], []
    # so few tokens repeat themselves
    whole = SamplingParams(temperature=temperature, seed=3, max_tokens=90, logprobs=2, allowed_token_ids=(70, 80, 90))
    for setting in ("", json.dumps(asked)):
        # all that is proposed is verified: how many drafts pay depends on how busy this machine is
        with mock.patch("baton.engine.speculation.building.DraftDepth", AllDrafts):
            llm = LLM(str(folder), num_threads=1, num_blocks=64, batch_invariant=True, speculative_config=setting)
        with mock.patch.object(EngineCore, "step", autospec=True, side_effect=EngineCore.step) as stepped:
            (first,) = llm.generate(PROMPT, whole)
        stopped = [replace(whole, stop=(first.text[place : place + 12],)) for place in range(40, 48)]
        found.append([first, *llm.generate([PROMPT] * 8, stopped)])
        num_steps.append(stepped.call_count)
    assert found[0] == found[1]
    assert found[0][1].finish_reason == "stop"
    assert [len(each.logprobs) for each in found[1]] == [len(each.token_ids) for each in found[1]]
    assert num_steps[1] < 0.8 * num_steps[0]


def test_a_user_who_asks_for_nothing_gets_drafts_from_text(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    params = DecodingParams(temperature=0.0, max_tokens=60, allowed_token_ids=(70, 80, 90))
    with mock.patch("baton.engine.speculation.building.DraftDepth", AllDrafts):
        engine = build_engine(EngineSettings(str(folder), num_threads=1, num_blocks=64), allocate_private)
    engine.core.add(key_of(1), Prompt.of((70, 80, 90, 70, 80, 90)), params)
    while engine.core.has_work:
        engine.core.step()
    (counts,) = engine.core.draft_counts.by_method()
    assert counts.method == "suffix"
    assert sum(counts.accepted_by_position) > 0


def test_a_user_who_predicts_the_text_gets_the_same_in_far_fewer_steps(tmp_path: Path) -> None:
    folder, found, num_steps = make_checkpoint(tmp_path, "llama"), [], []
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=90, logprobs=2)
    for setting in ("", '{"method": "suffix", "num_speculative_tokens": 8}'):
        with mock.patch("baton.engine.speculation.building.DraftDepth", AllDrafts):
            llm = LLM(str(folder), num_threads=1, num_blocks=64, batch_invariant=True, speculative_config=setting)
        with mock.patch.object(EngineCore, "step", autospec=True, side_effect=EngineCore.step) as stepped:
            found += llm.generate(PROMPT, params)
        num_steps.append(stepped.call_count)
        ids = found[0].token_ids
        params = replace(params, prediction_ids=(*ids[:30], ids[0] ^ 1, *ids[31:50], ids[2], *ids[50:60], *ids[64:]))
    assert found[0] == found[1]
    assert num_steps[1] < 0.5 * num_steps[0]


@pytest.mark.parametrize(
    ("family", "share_right", "settings"),
    [
        ("lfm2", 0.0, {}),
        ("lfm2", 1.0, {}),
        ("lfm2", 0.7, {"num_blocks": 40}),
        ("qwen3-next", 0.7, {"device": "emulated", "num_blocks": 60}),
        ("qwen3-next", 0.7, {"block_size": 2, "num_blocks": 300}),
    ],
    ids=["wrong", "right", "preempted", "asynchronous", "small-blocks"],
)
def test_states_go_back_behind_wrong_drafts(
    tmp_path: Path, family: str, share_right: float, settings: dict[str, Any]
) -> None:
    make_model(tmp_path, family)
    plain = said(built(tmp_path, **settings))
    proposer = Guessing(plain.following, share_right, most=5)
    drafted = said(built(tmp_path, proposer, **settings))
    assert_same(plain, drafted, is_exact=False)
    assert proposer.num_drafts > 50
    assert (proposer.num_accepted > 0) == (share_right > 0)


@pytest.mark.parametrize("family", ["llama", "lfm2", "qwen3-next"])
def test_what_drafts_leave_in_blocks_is_what_others_go_on_with(tmp_path: Path, family: str) -> None:
    """A request that is handed over in its middle, and one that finds its beginning in the prefix cache."""
    make_model(tmp_path, family)
    prompt, params = Prompt.of(range(9)), DecodingParams(temperature=0.0, max_tokens=30)
    plain = Followed()
    sizes: dict[str, Any] = {"num_blocks": 96, "block_size": 4}
    driven(built(tmp_path, **sizes), plain, key_of("a"), prompt, params)
    ids = [token.token_id for token in plain.tokens[key_of("a")]]
    for num_steps in range(3, 12, 2):
        source, target = (built(tmp_path, Guessing(plain.following, 0.6, most=4), **sizes) for _ in range(2))
        source.core.add(key_of("a"), prompt, params)
        for _ in range(num_steps):
            source.core.step()
        handed = source.core.handoffs.hand_over(key_of("a"), key_of("held"))
        assert handed is not None
        reservation = target.core.handoffs.reserve(key_of("a"), prompt, handed.output_ids)
        assert reservation is not None
        for source_id, target_id in zip(handed.block_table, reservation.missing_block_ids, strict=True):
            target.memory.blocks[target_id] = source.memory.blocks[source_id]
        first = FirstToken(key_of("a"), params, handed.next_token_id)
        target.core.handoffs.add_reserved(reservation, prompt, [first], handed.output_ids)
        found = Followed({key_of("a"): []})
        driven(target, found)
        said_before = [*handed.output_ids, handed.next_token_id]
        assert said_before + [token.token_id for token in found.tokens[key_of("a")]] == ids
        again = Followed()
        driven(
            target, again, key_of("b"), Prompt.of([*range(9), *ids[:20]]), DecodingParams(max_tokens=9, temperature=0)
        )
        assert [token.token_id for token in again.tokens[key_of("b")]] == ids[20:29]
        assert target.core.status().num_cached_blocks >= 9
