from __future__ import annotations

import random
import subprocess
import sys

import pytest

from baton.engine.cache.block_pool import BlockPool, pack_blocks
from baton.engine.scheduler.limits import SchedulerLimits
from baton.engine.scheduler.request import MEDIA_GONE
from baton.engine.scheduler.request_blocks import RequestBlocks
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.step import RequestOutput
from baton.wire.errors import ContextLengthExceeded, InvalidRequest, Overloaded
from baton.wire.images import PromptImage
from baton.wire.sampling import DecodingParams
from tests.engine.scheduler.simulation import EOS, Name, Simulation, continuation, next_token
from tests.request_keys import key_of


def endless(max_tokens: int = 4) -> DecodingParams:
    return DecodingParams(max_tokens=max_tokens, ignore_eos=True)


def prompt(num_tokens: int, first: int = 100) -> list[int]:
    return list(range(first, first + num_tokens))


def test_no_torch_is_needed_to_schedule() -> None:
    code = "import sys, baton.engine.scheduler.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_prompt_is_computed_in_chunks_of_the_budget() -> None:
    simulation = Simulation(budget=16)
    simulation.add("a", prompt(40))
    steps = [simulation.step().requests[0] for _ in range(4)]
    assert [(share.start, share.num_tokens) for share in steps] == [(0, 16), (16, 16), (32, 8), (40, 1)]
    assert [share.num_tokens + share.start == 40 for share in steps] == [False, False, True, False]


def test_streams_do_not_wait_for_a_long_prompt() -> None:
    simulation = Simulation(budget=8)
    simulation.add("stream", prompt(3), endless(20))
    simulation.step()
    simulation.add("long", prompt(40, 200))
    for _ in range(5):
        shares = {simulation.name(share): share.num_tokens for share in simulation.step().requests}
        assert shares == {"stream": 1, "long": 8}


def test_a_prompt_of_the_budget_takes_one_step_beside_streams_and_holds_none_up() -> None:
    simulation = Simulation(budget=8)
    simulation.add("stream", prompt(3), endless(20))
    simulation.step()
    for number in range(3):
        simulation.add(number, prompt(8, 100 * number + 100))
    for number in range(3):
        shares = [(simulation.name(share), share.num_tokens) for share in simulation.step().requests]
        assert shares == [("stream", 1), *((before, 1) for before in range(number)), (number, 8)]
        assert len(simulation.outputs[number]) == 1


def test_prompts_are_in_one_step_if_it_ends_them_all() -> None:
    simulation = Simulation(budget=8)
    for number in range(5):
        simulation.add(number, prompt((3, 5, 4, 9, 1)[number], 100 * number), endless(1))
    steps = [simulation.step().requests for _ in range(4)]
    assert [[(simulation.name(share), share.num_tokens) for share in step] for step in steps] == [
        [(0, 3), (1, 5)],
        [(2, 4)],
        [(3, 8)],
        [(3, 1), (4, 1)],
    ]


def test_at_most_max_num_seqs_run_together() -> None:
    simulation = Simulation(max_num_seqs=2)
    for number in range(5):
        simulation.add(number, prompt(2, 10 * number))
    assert len(simulation.step().requests) == 2
    assert (simulation.scheduler.requests.num_running, simulation.scheduler.requests.num_waiting) == (2, 3)
    simulation.run()
    assert len(simulation.finished) == 5


def test_a_full_batch_of_streams_is_in_every_step_when_the_budget_is_smaller() -> None:
    simulation = Simulation(budget=2, max_num_seqs=4)
    for number in range(4):
        simulation.add(number, prompt(1, 10 * number), endless(6))
    assert [len(simulation.step().requests) for _ in range(4)] == [2, 4, 4, 4]
    simulation.run()
    assert {number: len(output) for number, output in simulation.outputs.items()} == dict.fromkeys(range(4), 6)


@pytest.mark.parametrize("num_tokens", [16, 17, 1000])
def test_what_can_never_fit_is_refused_at_once(num_tokens: int) -> None:
    simulation = Simulation(num_blocks=4, block_size=4)
    with pytest.raises(ContextLengthExceeded, match=f"{num_tokens} tokens .* 16 tokens"):
        simulation.add("a", prompt(num_tokens))
    assert not simulation.core.has_work


def test_a_request_without_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        Simulation().add("a", [])


def test_a_request_that_fills_the_whole_pool_finishes_at_the_end_of_the_context() -> None:
    simulation = Simulation(num_blocks=4, block_size=4)
    simulation.add("a", prompt(15), endless(100))
    simulation.run()
    assert (len(simulation.outputs["a"]), simulation.finished["a"]) == (1, "length")


def test_a_full_queue_is_overloaded() -> None:
    scheduler = Scheduler(BlockPool(4), SchedulerLimits(4, 1, 4, 16, max_num_waiting=1), frozenset())
    simulation = Simulation()
    scheduler.add(simulation.request("a", [1], endless()))
    with pytest.raises(Overloaded):
        scheduler.add(simulation.request("b", [1], endless()))


@pytest.mark.parametrize("num_tokens", [8, 9, 11, 12])
def test_a_known_prompt_skips_all_but_its_last_token_at_most(num_tokens: int) -> None:
    simulation = Simulation(block_size=4)
    simulation.add("first", prompt(num_tokens))
    simulation.run()
    simulation.add("again", prompt(num_tokens))
    share = simulation.step().requests[0]
    assert share.start == (num_tokens - 1) // 4 * 4
    assert simulation.cached["again"] == share.start
    simulation.run()
    assert simulation.outputs["again"] == simulation.outputs["first"]


def test_output_is_cached_for_a_longer_prompt() -> None:
    simulation = Simulation(block_size=4)
    simulation.add("first", prompt(6), endless(7))
    simulation.run()
    simulation.add("next turn", [*prompt(6), *simulation.outputs["first"], 7])
    assert simulation.step().requests[0].start == 12


def test_two_prompts_of_one_beginning_share_its_blocks_while_both_run() -> None:
    simulation = Simulation(block_size=4)
    simulation.add("a", [*prompt(8), 1], endless(20))
    simulation.step()
    simulation.add("b", [*prompt(8), 2], endless(20))
    tables = {simulation.name(share): list(share.block_table) for share in simulation.step().requests}
    assert tables["a"][:2] == tables["b"][:2]
    assert not set(tables["a"][2:]) & set(tables["b"][2:])


def test_another_salt_finds_nothing() -> None:
    simulation = Simulation(block_size=4)
    simulation.add("first", prompt(9))
    simulation.run()
    other = simulation.request("other", prompt(9), endless())
    other.hash_root = b"salted"
    simulation.scheduler.add(other)
    simulation.outputs["other"] = []
    assert simulation.step().requests[0].start == 0


def test_without_prefix_caching_everything_is_computed() -> None:
    simulation = Simulation(prefix_caching=False)
    for key in ("first", "again"):
        simulation.add(key, prompt(9))
        assert simulation.step().requests[0].start == 0
        simulation.run()


def test_a_tiny_pool_preempts_the_newest_and_every_output_is_unchanged() -> None:
    simulation = Simulation(num_blocks=6, block_size=4, budget=32)
    prompts = {number: prompt(6, 100 * number) for number in range(3)}
    for key, token_ids in prompts.items():
        simulation.add(key, token_ids, endless(14))
    order = []
    while simulation.core.has_work:
        simulation.step()
        order += [key for key in simulation.finished if key not in order]
    assert simulation.scheduler.num_preemptions > 0
    assert order == [0, 1, 2]
    for key, token_ids in prompts.items():
        assert simulation.outputs[key] == continuation(token_ids, endless(14), 24)[0]


def test_blocks_that_a_preempted_request_finds_again_are_not_a_cache_hit() -> None:
    simulation = Simulation(num_blocks=6, block_size=4, budget=32)
    for key in range(2):
        simulation.add(key, prompt(8, 100 * key), endless(14))
    simulation.run()
    assert simulation.scheduler.num_preemptions > 0
    assert simulation.cached == {0: 0, 1: 0}


def stopping_prompt(token: int, index: int) -> list[int]:
    """A prompt whose output has `token` first at `index`."""
    for first in range(1000, 100_000):
        output = continuation([first], endless(index + 3), 100)[0]
        if output[index] == token and token not in output[:index]:
            return [first]
    raise AssertionError("no such prompt")


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (DecodingParams(max_tokens=9), (3, "stop")),
        (DecodingParams(max_tokens=2), (2, "length")),
        (DecodingParams(max_tokens=3), (3, "stop")),
        (DecodingParams(max_tokens=9, ignore_eos=True), (9, "length")),
        (DecodingParams(max_tokens=9, ignore_eos=True, stop_token_ids=(EOS,)), (3, "stop")),
        (DecodingParams(max_tokens=9, min_tokens=3), (3, "stop")),
        (DecodingParams(max_tokens=4, min_tokens=4), (4, "length")),
    ],
)
def test_requests_end_for_the_right_reason(params: DecodingParams, expected: tuple[int, str]) -> None:
    simulation = Simulation()
    simulation.add("a", stopping_prompt(EOS, 2), params)
    simulation.run()
    assert (len(simulation.outputs["a"]), simulation.finished["a"]) == expected


def test_a_stop_token_ends_a_request_and_is_part_of_its_output() -> None:
    simulation = Simulation()
    second = continuation([5], endless(2), 100)[0][1]
    simulation.add("a", [5], DecodingParams(max_tokens=9, ignore_eos=True, stop_token_ids=(second,)))
    simulation.run()
    assert (simulation.outputs["a"][-1], simulation.finished["a"]) == (second, "stop")


def test_a_request_ends_with_its_context() -> None:
    simulation = Simulation(max_request_tokens=12)
    simulation.add("a", prompt(7), DecodingParams(ignore_eos=True))
    simulation.run()
    assert (len(simulation.outputs["a"]), simulation.finished["a"]) == (5, "length")


def test_output_of_an_earlier_attempt_counts_towards_the_limits() -> None:
    simulation = Simulation()
    request = simulation.request("a", prompt(3), endless(4), continuation(prompt(3), endless(2), 99)[0])
    simulation.scheduler.add(request)
    simulation.outputs["a"] = request.token_ids[3:]
    simulation.run()
    assert simulation.outputs["a"] == continuation(prompt(3), endless(4), 99)[0]


@pytest.mark.parametrize("num_tokens", [7, 8, 9])
def test_a_request_that_comes_with_its_kv_computes_one_token_a_step(num_tokens: int) -> None:
    simulation = Simulation(block_size=4)
    assert simulation.add_computed("a", prompt(num_tokens), endless(5))
    simulation.run()
    assert simulation.outputs["a"] == continuation(prompt(num_tokens), endless(5), 99)[0]
    assert simulation.device.num_computed_tokens == 4


def test_a_request_that_comes_with_its_kv_is_refused_as_any_other() -> None:
    scheduler = Scheduler(BlockPool(4), SchedulerLimits(4, 1, 4, 16), frozenset())
    request = Simulation().request("a", prompt(16), endless())
    request.block_table, request.num_computed_tokens = pack_blocks(range(4)), 15
    with pytest.raises(ContextLengthExceeded):
        scheduler.add_computed(request)
    assert scheduler.requests.is_empty


@pytest.mark.parametrize(("num_blocks", "has_room"), [(4, False), (5, True)])
def test_there_is_room_beside_a_request_for_what_just_fits(num_blocks: int, has_room: bool) -> None:
    blocks = RequestBlocks(BlockPool(num_blocks), 4, has_states=False)
    waiting = Simulation().request("a", prompt(9), endless())
    assert blocks.has_room_beside(waiting, 8) is has_room


def test_a_request_whose_images_are_not_here_leaves_its_blocks_and_holds_nobody_up() -> None:
    pool = BlockPool(8)
    scheduler = Scheduler(pool, SchedulerLimits(4, 4, 16, 32), frozenset())
    other = Simulation().request("other", prompt(9), endless())
    lost = Simulation().request("lost", prompt(9), endless(), media=[PromptImage(2, 2, b"i" * 16, b"", 28, 28)])
    for request in (lost, other):
        scheduler.add(request)
    assert [share.key for share in scheduler.schedule().requests] == [other.key]
    assert scheduler.take_lost() == [RequestOutput(lost.key, 0, 0, 0, 0, (), "", True, True, MEDIA_GONE)]
    assert (scheduler.take_lost(), scheduler.requests.get(lost.key)) == ([], None)
    pool.check(dict.fromkeys(other.block_table, 1))


def test_only_requests_with_media_are_refused_for_the_media_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.engine.scheduler.limits.MAX_PAYLOAD_BYTES_HELD", -1)
    scheduler = Scheduler(BlockPool(8), SchedulerLimits(4, 4, 16, 32), frozenset())
    plain = Simulation().request("plain", prompt(9), endless())
    seeing = Simulation().request("seeing", prompt(9), endless(), media=[PromptImage(2, 2, b"i" * 16, b"", 28, 28)])
    scheduler.add(plain)
    with pytest.raises(Overloaded, match="media of other requests"):
        scheduler.add(seeing)
    assert list(scheduler.requests) == [plain]


def test_a_fork_of_full_blocks_shares_them_although_no_block_is_left() -> None:
    pool = BlockPool(2)
    blocks = RequestBlocks(pool, 4, has_states=True)
    source, fork = (Simulation().request(name, prompt(8), endless()) for name in ("source", "fork"))
    assert blocks.take_for(source)
    blocks.fork(fork, source, 8)
    assert (fork.block_table, fork.num_computed_tokens) == (source.block_table, 8)
    pool.check({0: 2, 1: 2})


def test_requests_that_come_with_their_kv_go_first_and_in_order() -> None:
    simulation = Simulation(max_num_seqs=1)
    simulation.add("running", prompt(3), endless(6))
    simulation.step()
    for number in range(3):
        assert simulation.reserve(number, prompt(4, 300 + 10 * number))
    simulation.add("waiting", prompt(3, 200), endless(2))
    for number in range(3):
        simulation.deliver(number, endless(3))
    simulation.run()
    assert list(simulation.finished) == ["running", 0, 1, 2, "waiting"]


def test_a_waiting_request_loses_its_kv_before_a_running_one_is_preempted() -> None:
    simulation = Simulation(num_blocks=6, block_size=4, max_num_seqs=1)
    simulation.add("runner", prompt(7), endless(12))
    simulation.step()
    assert simulation.add_computed("idle", prompt(9, 200), endless(5))
    for _ in range(10):
        assert simulation.name(simulation.step().requests[0]) == "runner"
    simulation.run()
    assert simulation.outputs["idle"] == continuation(prompt(9, 200), endless(5), 24)[0]


def test_requests_that_fill_the_pool_with_their_kv_all_finish() -> None:
    simulation = Simulation(num_blocks=6, block_size=4, max_num_seqs=8)
    prompts = {number: prompt(8, 100 * number) for number in range(3)}
    for key, token_ids in prompts.items():
        assert simulation.add_computed(key, token_ids, endless(9))
    assert simulation.pool.num_available == 0
    simulation.run()
    assert simulation.outputs == {key: continuation(ids, endless(9), 24)[0] for key, ids in prompts.items()}


def test_kv_that_came_is_not_stuck_behind_a_prompt_without_room() -> None:
    simulation = Simulation(num_blocks=6, block_size=4)
    assert simulation.reserve("holder", prompt(8, 200))
    simulation.add("large", prompt(20))
    simulation.deliver("holder", endless(3))
    simulation.run()
    assert list(simulation.finished) == ["holder", "large"]


@pytest.mark.parametrize("num_steps", range(6))
def test_an_abort_at_any_time_releases_every_block(num_steps: int) -> None:
    simulation = Simulation(num_blocks=8, block_size=4, budget=6, max_num_seqs=2)
    for number in range(3):
        simulation.add(number, prompt(9, 100 * number), endless(8))
    for _ in range(num_steps):
        simulation.step()
    for number in (1, 0, 2):
        simulation.abort(number)
        simulation.check_blocks()
    assert simulation.pool.num_held == 0
    assert simulation.step().requests == ()


def test_aborting_what_is_unknown_is_harmless() -> None:
    assert Simulation().scheduler.requests.remove(key_of("nobody")) is None


@pytest.mark.parametrize("seed", range(12))
def test_random_traffic_ends_with_exactly_the_right_tokens(seed: int) -> None:
    draw = random.Random(seed)
    simulation = Simulation(
        num_blocks=draw.choice((8, 12, 40)),
        block_size=draw.choice((2, 4)),
        max_num_seqs=draw.choice((1, 3, 8)),
        budget=draw.choice((1, 5, 16, 64)),
        prefix_caching=draw.random() < 0.8,
    )
    limit = simulation.limits.max_request_tokens
    expected: dict[Name, tuple[list[int], str]] = {}
    bases = [[draw.randrange(50) for _ in range(limit)] for _ in range(3)]
    for key in range(150):
        token_ids = draw.choice(bases)[: draw.randrange(1, limit)] + [draw.randrange(50)] * draw.randrange(2)
        token_ids = token_ids[: limit - 1]
        max_tokens = draw.choice((None, *range(1, 12)))
        params = DecodingParams(
            max_tokens=max_tokens,
            min_tokens=draw.randrange((max_tokens or 10) + 1),
            ignore_eos=draw.random() < 0.3,
            stop_token_ids=tuple(draw.sample(range(50), draw.randrange(3))),
        )
        if draw.random() < 0.7:
            simulation.add(key, token_ids, params)
        elif not simulation.add_computed(key, token_ids, params):
            continue
        expected[key] = continuation(token_ids, params, limit)
        for _ in range(draw.randrange(6)):
            simulation.step()
        if draw.random() < 0.1:
            victim = draw.choice(list(expected))
            simulation.abort(victim)
            if victim not in simulation.finished:
                del expected[victim]
            simulation.check_blocks()
    simulation.run()
    assert simulation.pool.num_held == 0
    found = {key: (simulation.outputs[key], simulation.finished[key]) for key in expected}
    assert found == expected


def test_the_simulated_model_depends_on_every_token() -> None:
    assert len({next_token([first, 2, 3]) for first in range(100)}) > 10
