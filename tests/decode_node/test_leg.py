from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from baton.kvtransfer.messages import Commit
from baton.kvtransfer.transports.base import Move
from baton.runtime.clock import now_us
from baton.wire.errors import ContextLengthExceeded, InvalidMessage, Overloaded, TransferFailed
from baton.wire.messages.legs import PrefillPeer
from baton.wire.request_key import RequestKey, new_handoff_id, owner_of_epoch
from tests.kvtransfer.legs import Relay, open_relay, undisturbed
from tests.kvtransfer.loopback import Fault
from tests.kvtransfer.pair import NUM_BLOCKS
from tests.kvtransfer.pools import BLOCK_SIZE, LEASE_S, key_of

KEY = key_of(1)
PROMPT = list(range(18))


@pytest.fixture(params=[False, True], ids=["one by one", "overlapped"])
def overlaps(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(params=[True, False], ids=["memory", "mailbox"])
def relay(request: pytest.FixtureRequest, overlaps: bool) -> Iterator[Relay]:
    with open_relay(peers_write=request.param, overlaps=overlaps) as relay:
        yield relay


def test_a_relay_generates_what_one_engine_alone_generates(relay: Relay) -> None:
    for num_tokens in (1, 3, 4, 5, 8, 18, 40):
        key, prompt = key_of(num_tokens), [num_tokens] * num_tokens
        relay.ask(key, prompt)
        relay.until_finished(key)
        assert relay.decode.stream(key) == undisturbed(prompt)
        assert relay.prefill.stream(key) == undisturbed(prompt)[:1]
    assert relay.decode.failures == []


def test_a_prompt_that_is_cached_here_is_not_sent_again(relay: Relay) -> None:
    for number in (1, 2):
        relay.ask(key_of(number), PROMPT)
        relay.until_finished(key_of(number))
    found = {metric.name: metric.samples[0].value for metric in relay.decode.leg.metrics()}
    assert found["baton:kv_receive_blocks"] == 5 + 1
    assert relay.decode.stream(key_of(1)) == relay.decode.stream(key_of(2)) == undisturbed(PROMPT)


def test_many_requests_at_once_do_not_mix(relay: Relay) -> None:
    keys = [key_of(number) for number in range(1, 9)]
    for number, key in enumerate(keys):
        relay.ask(key, [number] * 9, max_tokens=5)
    relay.until_finished(*keys)
    for number, key in enumerate(keys):
        assert relay.decode.stream(key) == undisturbed([number] * 9, max_tokens=5)
    assert relay.decode.failures == []


@pytest.mark.parametrize("seed", range(2))
def test_blocks_that_often_change_their_owner_hold_the_owners_kv(relay: Relay, seed: int) -> None:
    """Requests end by unpredictable tokens or are cancelled, while others are granted their blocks."""
    chance = random.Random(seed)
    relay.stop_token_ids = tuple(range(0, 50, 7))
    prompts = {key_of(number): [number] * chance.randrange(3, 16) for number in range(1, 41)}
    waiting = list(prompts)
    live: list[RequestKey] = []
    cancelled: set[RequestKey] = set()
    while waiting or live:
        if waiting and len(live) < 6:
            live.append(waiting.pop(0))
            relay.ask(live[-1], prompts[live[-1]])
        relay.decode.leg.poll(relay.now_s)
        for _ in range(chance.randrange(6)):  # granted blocks may be written while a step is in flight
            relay.prefill.threads[0].turn(relay.now_s)
            relay.decode.threads[0].turn(relay.now_s)
        relay.round()
        victim = chance.choice(live)
        if chance.random() < 0.02:
            cancelled.add(victim)
            for leg in (relay.decode.leg, relay.prefill.leg):
                leg.cancel(victim, relay.now_s)
        ended = cancelled | relay.decode.finished.keys() | relay.prefill.finished.keys()
        live = [key for key in live if key not in ended]
    relay.until(lambda: relay.is_empty)
    assert relay.prefill.failures == relay.decode.failures == []
    for key in prompts.keys() - cancelled:
        found = relay.decode.stream(key) or relay.prefill.stream(key)
        assert found == undisturbed(prompts[key], stop_token_ids=relay.stop_token_ids)


def test_without_a_prefill_node_the_prompt_is_computed_here(relay: Relay) -> None:
    relay.decode.leg.begin(replace(relay.decode_request(KEY, PROMPT), prefill_peer=None), 0.0)
    relay.until_finished(KEY)
    assert relay.decode.stream(KEY) == undisturbed(PROMPT)


def test_damaged_kv_fails_once_and_the_next_attempt_works(overlaps: bool) -> None:
    def plan(number: int, key: RequestKey, move: Move) -> Fault:
        return Fault(flipped_bits=(9,)) if key == KEY and move.index == 2 else Fault()

    with open_relay(plan=plan, overlaps=overlaps) as relay:
        relay.ask(KEY, PROMPT)
        relay.until(lambda: relay.is_empty)
        ((failed, error),) = relay.decode.failures
        assert failed == KEY
        assert isinstance(error, TransferFailed)
        assert "damaged" in str(error)
        assert relay.decode.stream(KEY) == []
        again = key_of(1, attempt=2)
        relay.ask(again, PROMPT)
        relay.until_finished(again)
        assert relay.decode.stream(again) == undisturbed(PROMPT)


def test_kv_that_arrives_damaged_once_is_sent_again_and_no_token_differs(overlaps: bool) -> None:
    flips = [Fault(flipped_bits=(9,))] * 3
    with open_relay(plan=lambda number, key, move: flips.pop() if flips else Fault(), overlaps=overlaps) as relay:
        for number in (1, 2):
            relay.ask(key_of(number), [number, *PROMPT])
        relay.until_finished(key_of(1), key_of(2))
        for number in (1, 2):
            assert relay.decode.stream(key_of(number)) == undisturbed([number, *PROMPT])
        found = {metric.name: metric.samples[0].value for metric in relay.decode.leg.metrics()}
        assert found["baton:kv_receive_damaged_blocks"] == 3
        assert found["baton:kv_receive_failed"] == 0


def test_requests_wait_for_room_and_get_it_in_order(relay: Relay) -> None:
    large, medium, small = ([number] * num_tokens for number, num_tokens in ((1, 40), (2, 36), (3, 4)))
    keys = [key_of(number) for number in (1, 2, 3)]
    relay.link.lose(Commit)
    for key, prompt in zip(keys, (large, medium, small), strict=True):
        relay.ask_decode(key, prompt)
    relay.settle()
    held = relay.decode.core.status().num_held_blocks
    assert held == 10, "the small one must not overtake the one that waits for room"
    assert relay.decode.leg.num_live == 3
    relay.link.lose()
    relay.decode.leg.cancel(keys[0], 0.0)
    relay.prefill.leg.cancel(keys[0], 0.0)
    for key, prompt in zip(keys[1:], (medium, small), strict=True):
        relay.ask_prefill(key, prompt)
    relay.until_finished(*keys[1:])
    assert relay.decode.stream(keys[1]) == undisturbed(medium)
    assert relay.decode.stream(keys[2]) == undisturbed(small)


def test_cancel_while_waiting_for_room_while_awaited_and_while_running(relay: Relay) -> None:
    relay.ask(key_of(1), PROMPT, max_tokens=40)
    relay.until(lambda: len(relay.decode.stream(key_of(1))) > 2)
    relay.ask_decode(key_of(2), [2] * 20)
    relay.ask_decode(key_of(3), [3] * 40)
    relay.settle()
    for number in (3, 2, 1):
        relay.decode.leg.cancel(key_of(number), relay.now_s)
        relay.decode.leg.cancel(key_of(number), relay.now_s)
    relay.until(lambda: relay.is_empty)
    assert relay.decode.failures == []


def test_cancel_all_releases_all_blocks(relay: Relay) -> None:
    relay.ask(key_of(1), PROMPT, max_tokens=40)
    relay.until(lambda: len(relay.decode.stream(key_of(1))) > 2)
    relay.ask_decode(key_of(2), [2] * 20)
    relay.ask_decode(key_of(3), [3] * 60)
    relay.decode.leg.cancel_all(relay.now_s)
    relay.settle()
    assert relay.is_empty
    assert sorted(key for key, _ in relay.decode.failures) == [key_of(1), key_of(2), key_of(3)]


def test_what_one_router_asked_for_is_cancelled_without_that_of_another(relay: Relay) -> None:
    own, other = (RequestKey(new_handoff_id(owner_of_epoch(epoch)), 1) for epoch in (1, 2))
    for key in (own, other):
        relay.ask(key, PROMPT, max_tokens=40)
    relay.until(lambda: min(len(relay.decode.stream(key)) for key in (own, other)) > 2)
    for leg in (relay.prefill.leg, relay.decode.leg):
        leg.cancel_all(relay.now_s, owner_of_epoch(2))
    relay.until_finished(own)
    relay.settle()
    assert relay.is_empty
    assert relay.decode.stream(own) == undisturbed(PROMPT, max_tokens=40)
    assert [key for key, _ in relay.decode.failures] == [other]


def test_more_requests_than_a_node_can_remember_are_refused(relay: Relay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.decode_node.leg.MAX_AWAITED", 1)
    relay.ask_decode(key_of(1), PROMPT)
    with pytest.raises(Overloaded):
        relay.ask_decode(key_of(2), PROMPT)
    relay.decode.leg.cancel_all(0.0)
    relay.until(lambda: relay.is_empty)


def test_a_first_token_outside_the_vocabulary_fails_its_own_request_only(relay: Relay) -> None:
    relay.ask(key_of(2), [2] * 9, max_tokens=30)
    relay.until(lambda: len(relay.decode.stream(key_of(2))) > 2)
    relay.prefill.runner.forced_token = 10**6
    relay.ask(KEY, PROMPT)
    relay.until(lambda: bool(relay.decode.failures))
    relay.until_finished(key_of(2))
    assert "outside the vocabulary" in relay.decode.failures_of(KEY)[0]
    assert relay.decode.stream(key_of(2)) == undisturbed([2] * 9, max_tokens=30)


def test_a_request_whose_kv_never_comes_fails_once_when_the_lease_expires(relay: Relay) -> None:
    relay.ask_decode(KEY, PROMPT)
    relay.pass_time(LEASE_S + 2)
    relay.until(lambda: relay.is_empty)
    assert len(relay.decode.failures_of(KEY)) == 1


def test_a_step_that_cannot_be_computed_fails_its_requests_once(relay: Relay) -> None:
    relay.ask(KEY, PROMPT)
    relay.decode.runner.error = ValueError("device lost")
    relay.until(lambda: relay.is_empty)
    assert len(relay.decode.failures_of(KEY)) == 1


def test_an_attempt_that_exists_is_refused_in_every_state(relay: Relay) -> None:
    relay.ask_decode(key_of(1), PROMPT)
    relay.ask_decode(key_of(2), [2] * 60)
    relay.decode.leg.begin(replace(relay.decode_request(key_of(3), PROMPT), prefill_peer=None), 0.0)
    for number in (1, 2, 3):
        with pytest.raises(InvalidMessage, match="exists already"):
            relay.ask_decode(key_of(number), PROMPT)
    relay.decode.leg.cancel_all(0.0)
    relay.until(lambda: relay.is_empty)


def test_a_prompt_that_can_never_fit_is_refused_and_leaves_nothing(relay: Relay) -> None:
    with pytest.raises(ContextLengthExceeded):
        relay.ask_decode(KEY, range(NUM_BLOCKS * BLOCK_SIZE))
    assert relay.decode.is_empty


@pytest.mark.parametrize("num_waiting_tokens", [8, 60])
@pytest.mark.parametrize("address", ["nonsense", "tcp://a b:5"])
def test_a_peer_that_cannot_be_dialled_is_refused_and_leaves_nothing(
    relay: Relay, num_waiting_tokens: int, address: str
) -> None:
    relay.ask_decode(key_of(9), [9] * 30)
    request = relay.decode_request(KEY, range(num_waiting_tokens))
    relay.decode.leg.begin(replace(request, prefill_peer=PrefillPeer(address, 1, address)), 0.0)
    relay.settle()
    assert relay.decode.leg.num_live == 1
    ((failed, error),) = relay.decode.failures
    assert failed == KEY
    assert "address" in str(error) or "cannot be reached" in str(error)
    relay.decode.leg.cancel(key_of(9), 0.0)
    relay.until(lambda: relay.is_empty)


def test_the_timestamps_of_a_handoff_are_in_order(relay: Relay) -> None:
    asked_us = now_us()
    relay.ask(KEY, PROMPT)
    relay.until_finished(KEY)
    first, second = relay.prefill.times[KEY, 0], relay.decode.times[KEY, 1]
    assert second.ready_us is not None
    stamps = [
        asked_us,
        first.begun_us,
        first.sampled_us,
        second.ready_us,
        second.begun_us,
        second.sampled_us,
        now_us(),
    ]
    assert stamps == sorted(stamps)
    assert relay.decode.times.keys() == {(KEY, 0), (KEY, 1)}, "later tokens are not timed"
    assert relay.decode.times[KEY, 0] == first, "it is repeated like its token"


def test_a_prompt_computed_here_has_the_times_of_its_first_two_tokens(relay: Relay) -> None:
    relay.decode.leg.begin(replace(relay.decode_request(KEY, PROMPT), prefill_peer=None), 0.0)
    relay.until_finished(KEY)
    first, second = relay.decode.times[KEY, 0], relay.decode.times[KEY, 1]
    assert first.ready_us is second.ready_us is None
    assert first.begun_us <= first.sampled_us <= second.begun_us <= second.sampled_us
    assert relay.decode.times.keys() == {(KEY, 0), (KEY, 1)}


@pytest.mark.parametrize("num_rounds", [0, 1, 2, 4])
def test_a_request_that_is_cancelled_or_fails_early_is_not_remembered(relay: Relay, num_rounds: int) -> None:
    keys = key_of(1), key_of(2)
    for key in keys:
        relay.decode.leg.begin(replace(relay.decode_request(key, PROMPT), prefill_peer=None), 0.0)
    for _ in range(num_rounds):
        relay.decode.round(0.0)
    relay.decode.leg.cancel(keys[0], 0.0)
    relay.decode.runner.error = ValueError("device lost")
    relay.until(lambda: not relay.decode.leg.num_live)
    assert not len(relay.decode.first_steps)


def test_a_request_that_ends_with_its_first_token_is_not_remembered(relay: Relay) -> None:
    relay.decode.leg.begin(replace(relay.decode_request(KEY, PROMPT, max_tokens=1), prefill_peer=None), 0.0)
    relay.until_finished(KEY)
    assert not len(relay.decode.first_steps)
