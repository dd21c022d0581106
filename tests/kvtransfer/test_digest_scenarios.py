"""The seven scenarios of the digest validation that vLLM's NIXL connector was given, on two legs with oracle engines.

The next token of the oracle is a hash of all KV bytes of the sequence, so equal text means equal KV. In each scenario:
the text is that of an undisturbed engine, every damaged handoff is caught, and nothing else is taken for damaged.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from kvtransfer.messages import Commit
from kvtransfer.transports.base import Move
from tests.kvtransfer.legs import Relay, open_relay, undisturbed
from tests.kvtransfer.loopback import Fault
from tests.kvtransfer.pools import BLOCK_BYTES, BLOCK_SIZE, key_of
from wire.request_key import RequestKey

_NUM_PROMPTS = 6
_MAX_ATTEMPTS = 3
_DEADLINE_S = 30.0


@dataclass(slots=True)
class Damager:
    """A fault plan that flips one bit of chosen blocks and remembers which handoffs it damaged."""

    num_times: int = 1
    indexes: frozenset[int] = frozenset({0})
    keys: frozenset[RequestKey] | None = None
    is_on: bool = True
    num_flips: int = 0
    damaged: set[RequestKey] = field(default_factory=set)
    seen: dict[tuple[RequestKey, int], int] = field(default_factory=dict)

    def __call__(self, number: int, key: RequestKey, move: Move) -> Fault:
        is_meant = self.is_on and move.index in self.indexes and (self.keys is None or key in self.keys)
        place = (key, move.index)
        if not is_meant or self.seen.get(place, 0) == self.num_times:
            return Fault()
        self.seen[place] = self.seen.get(place, 0) + 1
        self.damaged.add(key)
        self.num_flips += 1
        return Fault(flipped_bits=(self.num_flips * 131 % (8 * BLOCK_BYTES),))


def prompt_of(number: int, num_tokens: int = 18) -> list[int]:
    """A prompt that shares no block with those of other numbers."""
    return [number % 50, number // 50 % 50, *(position % 50 for position in range(num_tokens - 2))]


def serve(relay: Relay, prompts: Sequence[Sequence[int]], *, max_tokens: int = 8) -> list[list[int]]:
    """The router's part: all prompts at once; an attempt that fails is followed by the next, the last of them computed
    on the decode node. Returns what each stream delivered.
    """
    attempts = dict.fromkeys(range(len(prompts)), 1)
    for number, prompt in enumerate(prompts):
        relay.ask(key_of(number), prompt, max_tokens=max_tokens)
    deadline_s = time.monotonic() + _DEADLINE_S
    num_noticed = 0
    while not (_is_finished(relay, attempts) and relay.is_empty):
        assert time.monotonic() < deadline_s
        relay.round()
        failures, num_noticed = relay.decode.failures[num_noticed:], len(relay.decode.failures)
        for key, _ in failures:
            number = int.from_bytes(key[0], "big")
            attempts[number] += 1
            relay.prefill.leg.cancel(key, relay.now_s)
            _ask_again(relay, key_of(number, attempts[number]), prompts[number], max_tokens)
    return [relay.decode.stream(key_of(number, attempt)) for number, attempt in attempts.items()]


def _is_finished(relay: Relay, attempts: dict[int, int]) -> bool:
    return all(key_of(number, attempt) in relay.decode.finished for number, attempt in attempts.items())


def _ask_again(relay: Relay, key: RequestKey, prompt: Sequence[int], max_tokens: int) -> None:
    if key[1] < _MAX_ATTEMPTS:
        relay.ask(key, prompt, max_tokens=max_tokens)
    else:
        request = relay.decode_request(key, prompt, max_tokens=max_tokens)
        relay.decode.leg.begin(replace(request, prefill_peer=None), relay.now_s)


def received(relay: Relay, name: str) -> int:
    """A counter of the decode node's receiving side."""
    metrics = {metric.name: metric.samples[0].value for metric in relay.decode.leg.metrics()}
    return int(metrics[f"baton:kv_receive_{name}"])


def texts_of(prompts: Sequence[Sequence[int]], *, max_tokens: int = 8) -> list[list[int]]:
    return [undisturbed(prompt, max_tokens=max_tokens) for prompt in prompts]


_KINDS = {"memory": (True, False), "mailbox, asynchronous": (False, True)}
"""(whether peers write into the pool themselves, whether the engines schedule asynchronously)"""

every_kind = pytest.mark.parametrize(("peers_write", "overlaps"), _KINDS.values(), ids=_KINDS)
PROMPTS = [prompt_of(number) for number in range(_NUM_PROMPTS)]


@every_kind
def test_a_clean(peers_write: bool, overlaps: bool) -> None:
    with open_relay(peers_write=peers_write, overlaps=overlaps) as relay:
        assert serve(relay, PROMPTS) == texts_of(PROMPTS)
        assert relay.decode.failures == []
        assert received(relay, "delivered") == _NUM_PROMPTS
        assert received(relay, "damaged_blocks") == received(relay, "resends") == 0


@every_kind
@pytest.mark.parametrize("index", [0, 4])
def test_b_a_flipped_bit_is_caught_and_sent_again(peers_write: bool, overlaps: bool, index: int) -> None:
    plan = Damager(indexes=frozenset({index}))
    with open_relay(plan=plan, peers_write=peers_write, overlaps=overlaps) as relay:
        assert serve(relay, PROMPTS) == texts_of(PROMPTS)
        assert len(plan.damaged) == _NUM_PROMPTS
        assert received(relay, "damaged_blocks") == received(relay, "resends") == plan.num_flips == _NUM_PROMPTS
        assert relay.decode.failures == []


@every_kind
def test_c_damaged_twice_goes_to_the_router_and_the_next_attempt_is_right(peers_write: bool, overlaps: bool) -> None:
    first_attempts = frozenset(key_of(number) for number in range(0, _NUM_PROMPTS, 2))
    plan = Damager(num_times=2, keys=first_attempts)
    with open_relay(plan=plan, peers_write=peers_write, overlaps=overlaps) as relay:
        assert serve(relay, PROMPTS) == texts_of(PROMPTS)
        assert plan.damaged == first_attempts == {key for key, _ in relay.decode.failures}
        assert all("damaged, twice" in str(error) for _, error in relay.decode.failures)
        assert len(relay.decode.failures) == len(first_attempts)
        assert all(relay.decode.stream(key) == [] for key in first_attempts)
        assert received(relay, "delivered") == _NUM_PROMPTS


@every_kind
def test_c_a_path_that_damages_everything_ends_in_recomputation(peers_write: bool, overlaps: bool) -> None:
    plan = Damager(num_times=2)
    with open_relay(plan=plan, peers_write=peers_write, overlaps=overlaps) as relay:
        assert serve(relay, PROMPTS[:4]) == texts_of(PROMPTS[:4])
        assert len(plan.damaged) == len(relay.decode.failures) == 4 * (_MAX_ATTEMPTS - 1)
        assert received(relay, "delivered") == 0


@every_kind
def test_d_many_at_once_raise_no_false_alarm(peers_write: bool, overlaps: bool) -> None:
    prompts = [prompt_of(number, 6 + number % 7) for number in range(60)]
    with open_relay(peers_write=peers_write, overlaps=overlaps, num_blocks=64) as relay:
        assert serve(relay, prompts, max_tokens=3) == texts_of(prompts, max_tokens=3)
        assert relay.decode.failures == []
        assert received(relay, "delivered") == 60
        assert received(relay, "damaged_blocks") == received(relay, "resends") == 0


@every_kind
def test_e_blocks_that_were_reused_before_anybody_read_them_are_never_delivered(
    peers_write: bool, overlaps: bool
) -> None:
    lease_s, num_victims = 0.05, 12
    prompts = [prompt_of(number, 6) for number in range(num_victims)]
    with open_relay(peers_write=peers_write, overlaps=overlaps, num_blocks=24, lease_s=lease_s) as relay:
        relay.ask(key_of(99), prompt_of(99))
        relay.until_finished(key_of(99))
        for number, prompt in enumerate(prompts):
            relay.ask_prefill(key_of(number), prompt)
        relay.until(lambda: all(relay.prefill.stream(key_of(number)) for number in range(num_victims)))
        relay.settle()
        blocks = relay.prefill.runner.blocks
        tables = [list(relay.prefill.core.block_table(key_of(number))) for number in range(num_victims)]
        kept = [blocks[table].copy() for table in tables]
        relay.now_s += 2 * lease_s
        for number in range(100, 106):  # churn: the whole pool is used again
            relay.ask_prefill(key_of(number), prompt_of(number, 17))
            relay.until(lambda number=number: bool(relay.prefill.stream(key_of(number))))  # type: ignore[misc]
            relay.now_s += 2 * lease_s
        overwritten = [not np.array_equal(blocks[table], old) for table, old in zip(tables, kept, strict=True)]
        assert sum(overwritten) == num_victims
        for number, prompt in enumerate(prompts):
            relay.ask_decode(key_of(number), prompt)
            relay.settle()
        caught = [len(relay.decode.failures_of(key_of(number))) for number in range(num_victims)]
        assert caught == [1] * sum(overwritten)
        assert all(relay.decode.stream(key_of(number)) == [] for number in range(num_victims))
        relay.now_s += 2 * lease_s  # the end of the churn
        for number, prompt in enumerate(prompts):
            again = key_of(number, attempt=2)
            relay.ask(again, prompt)
            relay.until_finished(again)
            assert relay.decode.stream(again) == undisturbed(prompt)
        assert received(relay, "damaged_blocks") == 0


@every_kind
def test_f_what_is_sent_after_a_prefix_hit_is_checked_as_well(peers_write: bool, overlaps: bool) -> None:
    plan = Damager(indexes=frozenset({1}), is_on=False)
    beginning = prompt_of(7, 12)
    prompts = [[*beginning, *(number + 10 for _ in range(9))] for number in range(6)]
    with open_relay(plan=plan, peers_write=peers_write, overlaps=overlaps, num_blocks=64) as relay:
        relay.ask(key_of(99), beginning)
        relay.until_finished(key_of(99))
        plan.is_on = True
        assert serve(relay, prompts) == texts_of(prompts)
        num_cached_blocks = len(beginning) // BLOCK_SIZE
        assert [relay.decode.num_cached_tokens[key_of(number)] for number in range(6)] == [12] * 6
        num_sent = num_cached_blocks + 6 * (-(-21 // BLOCK_SIZE) - num_cached_blocks)
        assert received(relay, "blocks") == num_sent
        assert received(relay, "damaged_blocks") == len(plan.damaged) == 6
        assert relay.decode.failures == []


@every_kind
def test_g_chunks_are_each_pushed_and_each_checked(peers_write: bool, overlaps: bool) -> None:
    plan = Damager(indexes=frozenset(range(0, 12, 2)))
    prompts = [prompt_of(number, 45) for number in range(4)]
    with open_relay(plan=plan, peers_write=peers_write, overlaps=overlaps) as relay:
        assert serve(relay, prompts) == texts_of(prompts)
        assert received(relay, "damaged_blocks") == plan.num_flips == 4 * 6
        assert received(relay, "resends") == 4
        assert relay.decode.failures == []
        assert relay.link.num_seen(Commit) == 2 * 4
