"""Choices of one prompt: computed, or received, once; then requests of their own that share the prompt's blocks."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.engine.handoffs import FirstToken
from baton.engine.scheduler.request import choices_of
from baton.wire.errors import InvalidRequest
from baton.wire.messages.output import TokenLogprobs
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams
from tests.checkpoints import make_checkpoint
from tests.engine.scheduler.simulation import Device, Name, Simulation, continuation
from tests.engine.test_core import BLOCK_SIZE, new_engine, note, num_held, prompt, run
from tests.request_keys import A, B, C, key_of

D = key_of("d")
KEYS = (A, B, C, D)
SAMPLED = DecodingParams(temperature=1.0, seed=11, max_tokens=9, ignore_eos=True)
KINDS = {
    "greedy": DecodingParams(temperature=0.0, max_tokens=9, ignore_eos=True),
    "sampled": SAMPLED,
    "penalties": replace(SAMPLED, presence_penalty=0.7, repetition_penalty=1.3),
    "truncated": replace(SAMPLED, top_k=40, top_p=0.9, min_p=0.01),
    "minimum": replace(SAMPLED, min_tokens=4, ignore_eos=False, stop_token_ids=tuple(range(0, 300, 2))),
    "bias": replace(SAMPLED, logit_bias_ids=(5, 6), logit_bias_values=(3.0, -4.0)),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "qwen3", "qwen3")


def separate(folder: Path, token_ids: Sequence[int], params: DecodingParams) -> dict[RequestKey, list[int]]:
    """What the choices say as requests of their own, one after another, without any sharing."""
    core = new_engine(folder, enable_prefix_caching=False).core
    found: dict[RequestKey, list[int]] = {}
    for key, own in choices_of(KEYS, params):
        core.add(key, Prompt.of(token_ids), own)
        found |= run(core)
    return found


@pytest.mark.parametrize(
    ("kind", "length"), [*((kind, 29) for kind in KINDS), *zip(KINDS, itertools.cycle((1, 7, 8)), strict=False)]
)
def test_forked_choices_equal_separate_requests(checkpoint: Path, kind: str, length: int) -> None:
    core = new_engine(checkpoint, max_num_batched_tokens=12).core
    core.add(A, Prompt.of(prompt(length)), KINDS[kind], forks=(B, C, D))
    found = run(core)
    assert found == separate(checkpoint, prompt(length), KINDS[kind])
    assert kind == "greedy" or len({tuple(tokens) for tokens in found.values()}) > 1
    assert num_held(core) == 0


@pytest.mark.parametrize("settings", [{"enable_prefix_caching": False}, {"num_blocks": 7}, {"max_num_seqs": 4}])
def test_forked_choices_equal_separate_requests_in_little_room(checkpoint: Path, settings: dict[str, Any]) -> None:
    core = new_engine(checkpoint, **settings).core
    core.add(key_of("before"), Prompt.of(prompt(9, seed=3)), replace(SAMPLED, max_tokens=3))
    core.add(A, Prompt.of(prompt(20)), SAMPLED, forks=(B, C, D))
    found = run(core)
    del found[key_of("before")]
    assert found == separate(checkpoint, prompt(20), SAMPLED)
    assert num_held(core) == 0
    assert (core.status().num_preemptions > 0) == ("num_blocks" in settings)


def test_a_choice_without_room_for_its_copy_waits_like_any_request(checkpoint: Path) -> None:
    core = new_engine(checkpoint, num_blocks=4).core
    core.add(D, Prompt.of(prompt(4, seed=5)), replace(SAMPLED, max_tokens=3))
    core.add(A, Prompt.of(prompt(20)), SAMPLED, forks=(B, C))
    found: dict[RequestKey, list[int]] = {}
    note(core.step(), found)
    assert [len(core.handoffs.block_table(key)) for key in (A, B, C, D)] == [3, 0, 0, 1]
    core.check()
    for key, tokens in run(core).items():
        found[key] += tokens
    del found[D]
    expected = separate(checkpoint, prompt(20), SAMPLED)
    assert found == {key: expected[key] for key in (A, B, C)}
    assert num_held(core) == 0


def test_choices_share_full_blocks_and_copy_the_last(checkpoint: Path) -> None:
    core = new_engine(checkpoint).core
    core.add(A, Prompt.of(prompt(20)), SAMPLED, forks=(B, C, D))
    outputs = core.step()
    assert [output.key for output in outputs] == list(KEYS)
    assert sum(output.num_step_tokens for output in outputs) == 20
    core.step()
    tables = [list(core.handoffs.block_table(key)) for key in KEYS]
    assert all(table[:2] == tables[0][:2] for table in tables)
    assert len({table[2] for table in tables}) == 4
    assert num_held(core) == 2 + 4
    core.check()


def test_a_prompt_of_full_blocks_is_shared_without_a_copy(checkpoint: Path) -> None:
    core = new_engine(checkpoint).core
    core.add(A, Prompt.of(prompt(16)), SAMPLED, forks=(B, C, D))
    core.step()
    assert num_held(core) == 2
    core.step()
    assert num_held(core) == 2 + 4


def test_log_probabilities_are_those_of_separate_requests(checkpoint: Path) -> None:
    params = replace(SAMPLED, logprobs=3)
    found: dict[bool, dict[RequestKey, list[TokenLogprobs | None]]] = {True: {}, False: {}}
    for is_forked in (True, False):
        core = new_engine(checkpoint).core
        if is_forked:
            core.add(A, Prompt.of(prompt(13)), params, forks=(B, C, D))
        else:
            for key, own in choices_of(KEYS, params):
                core.add(key, Prompt.of(prompt(13)), own)
        while core.has_work:
            for output in core.step():
                if output.tokens:
                    found[is_forked].setdefault(output.key, []).extend(token.logprobs for token in output.tokens)
    for key in KEYS:
        for forked, alone in zip(found[True][key], found[False][key], strict=True):
            assert forked is not None
            assert alone is not None
            assert forked.top_ids == alone.top_ids
            assert forked.logprob == pytest.approx(alone.logprob, abs=1e-5)


def test_a_first_token_may_end_some_choices_and_not_others(checkpoint: Path) -> None:
    firsts = {key: tokens[0] for key, tokens in separate(checkpoint, prompt(11), SAMPLED).items()}
    params = replace(SAMPLED, stop_token_ids=(firsts[A], firsts[C]))
    ended = {key for key, first in firsts.items() if first in params.stop_token_ids}
    assert ended != set(KEYS)
    core = new_engine(checkpoint).core
    core.add(A, Prompt.of(prompt(11)), params, forks=(B, C, D))
    outputs = core.step()
    core.check()
    assert {output.key for output in outputs if output.finish_reason == "stop"} == ended
    assert set(core.request_keys()) == set(KEYS) - ended
    found: dict[RequestKey, list[int]] = {}
    note(outputs, found)
    for key, tokens in run(core).items():
        found[key] += tokens
    assert found == separate(checkpoint, prompt(11), params)


def test_all_choices_of_one_token_leave_nothing(checkpoint: Path) -> None:
    core = new_engine(checkpoint).core
    core.add(A, Prompt.of(prompt(11)), replace(SAMPLED, max_tokens=1), forks=(B, C, D))
    assert [output.finish_reason for output in core.step()] == ["length"] * 4
    assert not core.has_work
    assert num_held(core) == 0


def test_first_tokens_only_come_from_one_prompt_whose_blocks_are_held(checkpoint: Path) -> None:
    core = new_engine(checkpoint).core
    core.add(A, Prompt.of(prompt(20)), SAMPLED, forks=(B, C, D), first_token_only=True)
    found: dict[RequestKey, list[int]] = {}
    outputs = core.step()
    note(outputs, found)
    assert found == {key: tokens[:1] for key, tokens in separate(checkpoint, prompt(20), SAMPLED).items()}
    assert all(output.has_left for output in outputs)
    assert not core.has_work
    assert len(core.handoffs.block_table(A)) == num_held(core) == 3
    assert core.handoffs.release(A)
    core.check()


@pytest.mark.parametrize("length", [7, 16, 29])
@pytest.mark.parametrize("going_on", [(A, B, C, D), (C, D), (B,)])
def test_received_kv_is_continued_by_the_choices_that_go_on(
    checkpoint: Path, length: int, going_on: tuple[RequestKey, ...]
) -> None:
    source, target = new_engine(checkpoint), new_engine(checkpoint)
    token_ids = prompt(length)
    reservation = target.core.handoffs.reserve(A, Prompt.of(token_ids))
    assert reservation is not None
    source.core.add(A, Prompt.of(token_ids), SAMPLED, forks=(B, C, D), first_token_only=True)
    found = run(source.core)
    for source_id, target_id in zip(source.core.handoffs.block_table(A), reservation.missing_block_ids, strict=True):
        target.memory.blocks[target_id] = source.memory.blocks[source_id]
    firsts = [FirstToken(key, own, found[key][0]) for key, own in choices_of(KEYS, SAMPLED) if key in going_on]
    target.core.handoffs.add_reserved(reservation, Prompt.of(token_ids), firsts)
    target.core.check()
    full, has_partial = divmod(length, BLOCK_SIZE)
    assert num_held(target.core) == full + len(going_on) * bool(has_partial)
    for key, tokens in run(target.core).items():
        found[key] += tokens
    expected = separate(checkpoint, token_ids, SAMPLED)
    assert {key: found[key] for key in going_on} == {key: expected[key] for key in going_on}
    assert num_held(target.core) == 0


def test_received_choices_of_which_one_is_refused_leave_nothing(checkpoint: Path) -> None:
    core = new_engine(checkpoint).core
    reservation = core.handoffs.reserve(A, Prompt.of(prompt(9)))
    assert reservation is not None
    firsts = [FirstToken(A, SAMPLED, 5), FirstToken(B, SAMPLED, 10**6)]
    with pytest.raises(InvalidRequest, match="outside the vocabulary"):
        core.handoffs.add_reserved(reservation, Prompt.of(prompt(9)), firsts)
    assert core.request_keys() == []
    assert num_held(core) == 0


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
@pytest.mark.parametrize("victims", [(A,), (B,), (A, B), (B, A, C), (D, C, B, A), (A, B, C, D)])
def test_choices_that_are_aborted_disturb_no_other(
    checkpoint: Path, num_steps: int, victims: tuple[RequestKey, ...]
) -> None:
    core = new_engine(checkpoint, max_num_batched_tokens=12).core
    core.add(A, Prompt.of(prompt(20)), SAMPLED, forks=(B, C, D))
    found: dict[RequestKey, list[int]] = {}
    for _ in range(num_steps):
        note(core.step(), found)
    for victim in victims:
        assert core.is_live(victim)
        assert core.abort(victim)
        assert not core.abort(victim)
        core.check()
    assert set(core.request_keys()) == set(KEYS) - set(victims)
    for key, tokens in run(core).items():
        found[key] = found.get(key, []) + tokens
    expected = separate(checkpoint, prompt(20), SAMPLED)
    for key in KEYS:
        assert found.get(key, []) == expected[key][: len(found.get(key, [])) if key in victims else None]
    assert not core.is_live(A)
    assert num_held(core) == 0


def test_the_key_of_a_fork_is_in_use(checkpoint: Path) -> None:
    core = new_engine(checkpoint).core
    core.add(A, Prompt.of(prompt(9)), SAMPLED, forks=(B,))
    for key in (A, B):
        with pytest.raises(ValueError, match="in use"):
            core.add(key, Prompt.of(prompt(5)), SAMPLED)


def test_more_choices_than_a_step_has_rows_are_refused(checkpoint: Path) -> None:
    core = new_engine(checkpoint, max_num_seqs=3).core
    with pytest.raises(InvalidRequest, match="4 choices"):
        core.add(A, Prompt.of(prompt(9)), SAMPLED, forks=(B, C, D))
    core.add(A, Prompt.of(prompt(9)), SAMPLED, forks=(B, C))
    core.add(D, Prompt.of(prompt(9)), SAMPLED)
    core.step()
    assert core.status().num_running == 1, "the forks would have no rows beside another request"
    assert len(run(core)) == 4


def serve(simulation: Simulation, draw: random.Random, num_prompts: int) -> tuple[int, int]:
    """Random prompts with choices, some of them received, and random aborts of single choices. Every step and the end
    are checked. (forks, aborted choices)."""
    limit, expected = simulation.limits.max_request_tokens, dict[Name, tuple[list[int], str]]()
    bases = [[draw.randrange(50) for _ in range(limit)] for _ in range(3)]
    num_forks = num_aborted = 0
    for number in range(num_prompts):
        token_ids = [*draw.choice(bases)[: draw.randrange(1, limit)], draw.randrange(50)][: limit - 1]
        params = DecodingParams(
            max_tokens=draw.choice((None, *range(1, 12))),
            ignore_eos=draw.random() < 0.3,
            stop_token_ids=tuple(draw.sample(range(50), draw.randrange(4))),
            presence_penalty=draw.choice((0.0, 0.0, 1.0)),
        )
        forks: list[Name] = [f"{number}.{fork}" for fork in range(draw.randrange(simulation.limits.max_num_seqs))]
        num_forks += len(forks)
        if draw.random() < 0.6:
            simulation.add(number, token_ids, params, forks)
        elif simulation.reserve(number, token_ids):
            simulation.step()
            simulation.deliver(number, params, forks)
        else:
            continue
        for choice, name in enumerate((number, *forks)):
            expected[name] = continuation(token_ids, replace(params, choice=choice), limit)
        for _ in range(draw.randrange(8)):
            simulation.step()
        for victim in draw.sample(list(expected), min(len(expected), draw.randrange(3))):
            if victim not in simulation.finished:
                simulation.abort(victim)
                simulation.check_blocks()
                output, _ = expected.pop(victim)
                assert simulation.outputs[victim] == output[: len(simulation.outputs[victim])]
                num_aborted += 1
    simulation.run()
    assert simulation.pool.num_held == 0
    assert {name: (simulation.outputs[name], simulation.finished[name]) for name in expected} == expected
    return num_forks, num_aborted


@pytest.mark.parametrize("failure_rate", [0.0, 0.1])
@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_random_choices_with_preemption_aborts_and_failed_steps_say_the_right_tokens(
    is_asynchronous: bool, failure_rate: float
) -> None:
    num_forks = num_aborted = num_preemptions = num_failures = 0
    for seed in range(8):
        draw = random.Random(seed)
        block_size = draw.choice((2, 4))
        simulation = Simulation(
            num_blocks=draw.choice((8, 12, 40)),
            block_size=block_size,
            max_num_seqs=draw.choice((2, 3, 8)),
            budget=draw.choice((1, 5, 16, 64)),
            prefix_caching=draw.random() < 0.7,
            device=Device(block_size, is_asynchronous, random.Random(seed), failure_rate),
        )
        forks, aborted = serve(simulation, draw, num_prompts=40)
        num_forks, num_aborted = num_forks + forks, num_aborted + aborted
        num_preemptions += simulation.scheduler.num_preemptions
        num_failures += simulation.num_failures
    assert num_forks > 300
    assert num_aborted > 50
    assert num_preemptions > 30
    assert (num_failures > 0) == (failure_rate > 0)


def test_a_fork_that_is_aborted_before_its_copy_leaves_its_blocks_alone() -> None:
    """Its copy must not be made later, into blocks that another node may write by then."""
    simulation = Simulation(num_blocks=8, device=Device(4, is_asynchronous=True))
    simulation.add("a", range(100, 106), DecodingParams(max_tokens=9, ignore_eos=True), ["b", "c"])
    while not simulation.outputs["b"]:
        simulation.step()
    simulation.abort("b")
    assert simulation.reserve("remote", range(200, 216))
    simulation.step()
    simulation.deliver("remote", DecodingParams(max_tokens=4, ignore_eos=True))
    simulation.run()
    for name, token_ids, choice in (("a", range(100, 106), 0), ("c", range(100, 106), 2)):
        params = DecodingParams(max_tokens=9, ignore_eos=True, choice=choice)
        assert simulation.outputs[name] == continuation(token_ids, params, 32)[0]
