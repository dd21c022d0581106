"""Choices of one prompt over both legs: one prompt computed, one handoff, and requests of their own afterwards."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from baton.kvtransfer.messages import Commit, Grant
from baton.kvtransfer.transports.base import Move
from baton.wire.errors import BatonError, InvalidMessage, TransferFailed
from baton.wire.request_key import RequestKey
from tests.kvtransfer.legs import Node, Relay, open_relay, undisturbed
from tests.kvtransfer.loopback import Fault
from tests.kvtransfer.oracle import EOS
from tests.kvtransfer.pools import LEASE_S, key_of

KEYS = tuple(key_of(number) for number in range(1, 5))
KEY, *FORKS = KEYS
PROMPT = list(range(18))


@pytest.fixture(params=[False, True], ids=["one by one", "overlapped"])
def relay(request: pytest.FixtureRequest) -> Iterator[Relay]:
    with open_relay(overlaps=request.param) as relay:
        yield relay


def alone(prompt: Sequence[int], choice: int, *, max_tokens: int = 8, stop: tuple[int, ...] = ()) -> list[int]:
    """What this choice says as a request of its own."""
    return undisturbed(prompt, max_tokens=max_tokens, stop_token_ids=stop, choice=choice)


def figure(node: Node, name: str) -> float:
    return {metric.name: metric.samples[0].value for metric in node.leg.metrics()}[name]


@pytest.mark.parametrize("num_tokens", [1, 4, 5, 18])
def test_choices_say_what_they_say_alone_after_one_prompt_and_one_handoff(relay: Relay, num_tokens: int) -> None:
    prompt = PROMPT[:num_tokens]
    relay.ask(KEY, prompt, forks=FORKS)
    relay.until_finished(*KEYS)
    for choice, key in enumerate(KEYS):
        assert relay.decode.stream(key) == alone(prompt, choice)
        assert relay.prefill.stream(key) == alone(prompt, choice)[:1]
    assert relay.prefill.runner.num_slots_written == num_tokens
    assert (relay.link.num_seen(Grant), relay.link.num_seen(Commit)) == (1, 1)
    assert figure(relay.decode, "baton:kv_receive_blocks") == -(-num_tokens // 4)
    assert relay.decode.num_cached_tokens[KEY] == 0


def test_the_prompts_blocks_are_held_once_until_the_choices_go_on(relay: Relay) -> None:
    relay.ask_decode(KEY, PROMPT, forks=FORKS)
    relay.settle()
    assert relay.decode.core.status().num_held_blocks == 5
    relay.ask_prefill(KEY, PROMPT, forks=FORKS)
    relay.until_finished(*KEYS)


def test_a_prompt_without_a_prefill_node_is_computed_once(relay: Relay) -> None:
    request = relay.decode_request(KEY, PROMPT, max_tokens=1, forks=FORKS)
    relay.decode.leg.begin(replace(request, prefill_peer=None), 0.0)
    relay.until_finished(*KEYS)
    assert [relay.decode.stream(key) for key in KEYS] == [alone(PROMPT, choice)[:1] for choice in range(4)]
    assert relay.decode.runner.num_slots_written == len(PROMPT)


def test_a_first_token_that_ends_some_choices_leaves_the_handoff_to_the_others(relay: Relay) -> None:
    firsts = [alone(PROMPT, choice)[0] for choice in range(4)]
    assert len(set(firsts)) > 1
    relay.stop_token_ids = (firsts[0],)
    relay.ask(KEY, PROMPT, forks=FORKS)
    relay.until_finished(*KEYS)
    for choice, key in enumerate(KEYS):
        assert relay.decode.stream(key) == alone(PROMPT, choice, stop=relay.stop_token_ids)
    assert relay.decode.finished[KEY] == relay.prefill.finished[KEY] == "stop"


@pytest.mark.parametrize("max_tokens", [1, 8])
def test_first_tokens_that_end_all_choices_end_the_handoff_before_it_begins(relay: Relay, max_tokens: int) -> None:
    if max_tokens > 1:
        relay.prefill.runner.forced_token = EOS
    relay.ask(KEY, PROMPT, max_tokens=max_tokens, forks=FORKS)
    relay.until(lambda: relay.is_empty and all(key in relay.prefill.finished for key in KEYS))
    assert relay.link.num_seen(Commit) == 0
    assert relay.prefill.failures == relay.decode.failures == []


@pytest.mark.parametrize("victims", [(KEY,), FORKS[:1], (KEY, FORKS[2])])
@pytest.mark.parametrize("num_rounds", [0, 3, 9])
def test_choices_that_are_cancelled_leave_the_others_alone(
    relay: Relay, victims: tuple[RequestKey, ...], num_rounds: int
) -> None:
    relay.ask(KEY, PROMPT, forks=FORKS)
    for _ in range(num_rounds):
        relay.round()
        relay.echo.wait()
    for victim in victims:
        for leg in (relay.prefill.leg, relay.decode.leg):
            leg.cancel(victim, relay.now_s)
            leg.cancel(victim, relay.now_s)
    others = [key for key in KEYS if key not in victims]
    relay.until_finished(*others)
    for choice, key in enumerate(KEYS):
        expected = alone(PROMPT, choice)
        found = relay.decode.stream(key)
        assert found == (expected[: len(found)] if key in victims else expected)
        assert num_rounds or key not in victims or not found, "what was cancelled before the KV came never joins"
    assert relay.prefill.failures == relay.decode.failures == []


@pytest.mark.parametrize("num_rounds", [0, 5])
def test_the_last_choice_that_is_cancelled_ends_the_handoff(relay: Relay, num_rounds: int) -> None:
    relay.ask(KEY, PROMPT, max_tokens=40, forks=FORKS)
    for _ in range(num_rounds):
        relay.round()
        relay.echo.wait()
    for key in (FORKS[0], KEY, FORKS[2], FORKS[1]):
        for leg in (relay.prefill.leg, relay.decode.leg):
            leg.cancel(key, relay.now_s)
    relay.until(lambda: relay.is_empty)
    assert relay.prefill.failures == relay.decode.failures == []


def test_a_handoff_that_fails_fails_every_choice_that_is_wanted(relay: Relay) -> None:
    relay.ask_decode(KEY, PROMPT, forks=FORKS)
    relay.decode.leg.cancel(FORKS[0], 0.0)
    relay.pass_time(LEASE_S + 2)
    relay.until(lambda: relay.is_empty)
    assert [key for key, _ in relay.decode.failures] == [KEY, *FORKS[1:]]
    assert all(isinstance(error, TransferFailed) for _, error in relay.decode.failures)


def test_choices_that_failed_together_can_be_tried_again_one_by_one() -> None:
    def plan(number: int, key: RequestKey, move: Move) -> Fault:
        return Fault(flipped_bits=(9,)) if key == KEY and move.index == 2 else Fault()

    with open_relay(plan=plan) as relay:
        relay.ask(KEY, PROMPT, forks=FORKS)
        relay.until(lambda: relay.is_empty)
        assert sorted(key for key, _ in relay.decode.failures) == sorted(KEYS)
        assert not any(relay.decode.stream(key) for key in KEYS)
        again = key_of(2, attempt=2)
        relay.ask(again, PROMPT)
        relay.until_finished(again)
        assert relay.decode.stream(again) == undisturbed(PROMPT)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_step_that_cannot_be_computed_fails_each_choice_once(relay: Relay, role: str) -> None:
    node = relay.prefill if role == "prefill" else relay.decode
    relay.ask(KEY, PROMPT, forks=FORKS)
    node.runner.error = ValueError("device lost")
    relay.until(lambda: len(node.failures) >= len(KEYS))
    for leg in (relay.prefill.leg, relay.decode.leg):
        for key in KEYS:
            leg.cancel(key, relay.now_s)
    relay.until(lambda: relay.is_empty)
    assert sorted(key for key, _ in node.failures) == sorted(KEYS)


def test_a_prompt_computed_here_that_fails_fails_each_choice_once(relay: Relay) -> None:
    request = relay.decode_request(KEY, PROMPT, forks=FORKS)
    relay.decode.leg.begin(replace(request, prefill_peer=None), 0.0)
    relay.decode.runner.error = ValueError("device lost")
    relay.until(lambda: relay.is_empty)
    assert sorted(key for key, _ in relay.decode.failures) == sorted(KEYS)


def test_a_router_that_is_gone_cancels_all_choices(relay: Relay) -> None:
    relay.ask(KEY, PROMPT, max_tokens=40, forks=FORKS)
    relay.until(lambda: len(relay.decode.stream(KEY)) > 2)
    relay.ask(key_of(9), [9] * 7, forks=[key_of(10)])
    for leg in (relay.prefill.leg, relay.decode.leg):
        leg.cancel_all(relay.now_s)
    relay.until(lambda: relay.is_empty)
    assert {key for key, _ in relay.decode.failures} == {*KEYS, key_of(9), key_of(10)}


def test_a_choice_that_exists_or_is_named_twice_is_refused(relay: Relay) -> None:
    relay.ask(KEY, PROMPT, forks=FORKS[:1])
    for ask in (relay.ask_prefill, relay.ask_decode):
        with pytest.raises(InvalidMessage, match="exists already"):
            ask(key_of(9), PROMPT, forks=[FORKS[0]])
        with pytest.raises(InvalidMessage, match="twice"):
            ask(key_of(9), PROMPT, forks=[key_of(8), key_of(8)])
    relay.until_finished(KEY, FORKS[0])


def test_more_choices_than_a_prefill_node_has_rows_are_refused_and_leave_nothing(relay: Relay) -> None:
    with pytest.raises(BatonError, match="9 choices"):
        relay.ask_prefill(KEY, PROMPT, forks=[key_of(number) for number in range(10, 18)])
    assert relay.prefill.is_empty


@pytest.mark.parametrize("seed", range(3))
def test_random_choices_and_cancels_say_the_right_tokens(relay: Relay, seed: int) -> None:
    """Prompts with choices come while others decode; many do not fit at once, and single choices are cancelled."""
    chance = random.Random(seed)
    relay.stop_token_ids = tuple(range(0, 50, 9))
    prompts: dict[RequestKey, tuple[list[int], int]] = {}
    cancelled: set[RequestKey] = set()
    number = 0
    for _ in range(14):
        prompt, num_choices = [number + 1] * chance.randrange(3, 16), chance.randrange(1, 6)
        keys = [key_of(number + 1 + choice) for choice in range(num_choices)]
        number += num_choices
        relay.ask(keys[0], prompt, forks=keys[1:])
        prompts |= {key: (prompt, choice) for choice, key in enumerate(keys)}
        for _ in range(chance.randrange(8)):
            relay.round()
            relay.echo.wait()
        if chance.random() < 0.6:
            cancelled.add(chance.choice(keys))
        for victim in cancelled:
            for leg in (relay.decode.leg, relay.prefill.leg):
                leg.cancel(victim, relay.now_s)
    relay.until(lambda: relay.is_empty)
    assert relay.prefill.failures == relay.decode.failures == []
    for key in prompts.keys() - cancelled:
        prompt, choice = prompts[key]
        found = relay.decode.stream(key) or relay.prefill.stream(key)
        assert found == alone(prompt, choice, stop=relay.stop_token_ids)
