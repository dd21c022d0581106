from __future__ import annotations

from collections.abc import Iterator

import pytest

from baton.engine.scheduler.request import ScheduledRequest
from baton.engine.scheduler.step import Step
from baton.kvtransfer.layers import LayerProgress
from baton.kvtransfer.messages import Commit, Grant, Release
from baton.runtime.clock import now_us
from baton.wire.errors import BatonError, ContextLengthExceeded, InvalidMessage
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey
from tests.kvtransfer.legs import Relay, open_relay, params, undisturbed
from tests.kvtransfer.oracle import EOS
from tests.kvtransfer.pair import NUM_BLOCKS
from tests.kvtransfer.pools import BLOCK_SIZE, LEASE_S, key_of

KEY = key_of(1)
PROMPT = list(range(18))


@pytest.fixture(params=[False, True], ids=["one by one", "overlapped"])
def relay(request: pytest.FixtureRequest) -> Iterator[Relay]:
    with open_relay(overlaps=request.param) as relay:
        yield relay


def test_token_1_is_reported_without_waiting_for_the_handoff(relay: Relay) -> None:
    relay.ask_prefill(KEY, PROMPT)
    relay.until(lambda: bool(relay.prefill.stream(KEY)))
    assert relay.prefill.stream(KEY) == undisturbed(PROMPT)[:1]
    assert relay.prefill.leg.num_live == 1


def leased(relay: Relay) -> tuple[int, int]:
    """Blocks that are held on P, and those of them that belong to handoffs."""
    status = relay.prefill.core.status()
    return status.num_held_blocks, status.num_leased_blocks


def test_blocks_are_held_until_the_lease_expires_when_no_grant_comes(relay: Relay) -> None:
    relay.ask_prefill(KEY, PROMPT)
    relay.until(lambda: bool(relay.prefill.stream(KEY)))
    relay.pass_time(LEASE_S - 2)
    assert leased(relay) == (5, 5)
    relay.ask_prefill(key_of(2), PROMPT)
    relay.until(lambda: bool(relay.prefill.stream(key_of(2))))
    assert leased(relay) == (6, 6)  # full blocks are shared
    relay.pass_time(3)
    assert leased(relay) == (5, 5)
    relay.pass_time(LEASE_S)
    assert relay.prefill.is_empty
    assert leased(relay) == (0, 0)
    assert relay.prefill.failures == []


def test_released_kv_stays_in_the_prefix_cache(relay: Relay) -> None:
    relay.ask(KEY, PROMPT)
    relay.until_finished(KEY)
    computed = relay.prefill.runner.num_slots_written
    relay.ask(key_of(2), PROMPT)
    relay.until_finished(key_of(2))
    assert relay.prefill.runner.num_slots_written == computed + len(PROMPT) - 4 * BLOCK_SIZE
    assert relay.decode.stream(key_of(2)) == undisturbed(PROMPT)


def num_pushed_blocks(relay: Relay) -> float:
    found = {metric.name: metric.samples[0].value for metric in relay.prefill.leg.metrics()}
    return found["baton:kv_send_blocks"]


def test_chunks_are_pushed_before_the_prompt_is_finished(relay: Relay) -> None:
    relay.ask_decode(KEY, PROMPT)
    relay.until(lambda: relay.link.num_seen(Grant) == 1)
    relay.ask_prefill(KEY, PROMPT)
    for _ in range(2):
        relay.prefill.round(0.0)
    while not num_pushed_blocks(relay):
        relay.prefill.leg.poll(0.0)
    assert num_pushed_blocks(relay) <= 12 // BLOCK_SIZE
    assert relay.prefill.stream(KEY) == []
    relay.until_finished(KEY)
    assert relay.link.num_seen(Commit) == relay.link.num_seen(Release) == 1


def test_a_first_token_that_ends_the_request_ends_both_legs(relay: Relay) -> None:
    relay.prefill.runner.forced_token = EOS
    relay.ask(KEY, PROMPT)
    relay.until(lambda: relay.is_empty and KEY in relay.prefill.finished)
    assert relay.prefill.finished[KEY] == "stop"
    assert relay.prefill.failures == relay.decode.failures == []


def test_cancel_in_the_middle_of_the_prompt_releases_all_blocks(relay: Relay) -> None:
    relay.ask_prefill(KEY, PROMPT)
    relay.prefill.round(0.0)
    relay.prefill.leg.cancel(KEY, 0.0)
    relay.prefill.leg.cancel(KEY, 0.0)
    relay.prefill.round(0.0)
    assert relay.prefill.is_empty
    relay.settle()
    assert relay.prefill.stream(KEY) == []


def test_cancel_all_releases_all_blocks(relay: Relay) -> None:
    for number in range(1, 4):
        relay.ask_prefill(key_of(number), [number, *PROMPT[:9]])
    for _ in range(3):
        relay.prefill.round(0.0)
    relay.prefill.leg.cancel_all(0.0)
    relay.settle()
    assert relay.is_empty
    assert sorted(key for key, _ in relay.prefill.failures) == [key_of(1), key_of(2), key_of(3)]


def test_a_step_that_cannot_be_computed_fails_its_requests_once(relay: Relay) -> None:
    relay.ask(KEY, PROMPT)
    relay.prefill.runner.error = ValueError("device lost")
    relay.until(lambda: relay.is_empty)
    assert len(relay.prefill.failures_of(KEY)) == 1
    assert len(relay.decode.failures_of(KEY)) == 1
    relay.prefill.runner.error = None
    relay.ask(key_of(2), PROMPT)
    relay.until_finished(key_of(2))


def test_a_request_that_fails_twice_is_reported_once(relay: Relay) -> None:
    relay.ask_prefill(KEY, PROMPT)
    error = ContextLengthExceeded("x")
    relay.prefill.leg.fail(KEY, error, 0.0)
    relay.prefill.leg.fail(KEY, error, 0.0)
    assert relay.prefill.leg.take_failures() == [(KEY, error)]
    assert relay.prefill.leg.take_failures() == []


def step_that_completes(relay: Relay, key: RequestKey) -> Step:
    """The step that computes the whole of `PROMPT` for this request."""
    table, prompt = list(range(5)), Prompt.of(PROMPT)
    return Step((ScheduledRequest(key, 0, len(PROMPT), PROMPT, prompt, table, params(8), needs_sample=True),))


def watched_layers(relay: Relay, key: RequestKey) -> LayerProgress:
    """The `LayerProgress` of a step that is launched now."""
    layer_stored = relay.prefill.leg.watch(step_that_completes(relay, key))
    layers = getattr(layer_stored, "__self__", None)
    assert isinstance(layers, LayerProgress)
    return layers


def test_layers_belong_to_their_own_step(relay: Relay) -> None:
    keys = [key_of(number) for number in (1, 2, 3)]
    for key in keys:
        relay.ask_prefill(key, PROMPT)
    first, second, third = (watched_layers(relay, key) for key in keys)
    relay.prefill.leg.applied([], 0.0)
    assert not first.is_abandoned, "its last layer may be counted a little later"
    assert not second.is_abandoned
    error = BatonError("the step failed")
    relay.prefill.leg.lost(error, 0.0)
    assert not first.is_abandoned
    assert second.is_abandoned
    assert third.is_abandoned
    assert relay.prefill.leg.take_failures() == [(keys[1], error), (keys[2], error)]


def test_a_prompt_fails_with_its_step_also_when_all_its_layers_were_stored(relay: Relay) -> None:
    relay.ask_decode(KEY, PROMPT)
    relay.until(lambda: relay.link.num_seen(Grant) == 1)
    relay.ask_prefill(KEY, PROMPT)
    layers = watched_layers(relay, KEY)
    layers.count()
    relay.prefill.threads[0].turn(0.0)
    assert num_pushed_blocks(relay) == 5
    relay.prefill.leg.lost(BatonError("the step failed"), 0.0)
    relay.until(lambda: relay.is_empty)
    assert relay.link.num_seen(Commit) == 0
    assert len(relay.prefill.failures_of(KEY)) == 1
    assert len(relay.decode.failures_of(KEY)) == 1


def test_a_failed_launch_while_a_step_is_in_flight_does_not_fail_finished_prompts() -> None:
    with open_relay(overlaps=True) as relay:
        relay.ask(key_of(1), PROMPT[:6])
        relay.ask(key_of(2), PROMPT[:5])
        relay.prefill.runner.failing_launch = 2
        relay.until(lambda: relay.is_empty)
        assert relay.decode.stream(key_of(1)) == undisturbed(PROMPT[:6])
        assert relay.prefill.failures_of(key_of(1)) == []
        assert len(relay.prefill.failures_of(key_of(2))) == len(relay.decode.failures_of(key_of(2))) == 1


def test_a_prompt_that_can_never_fit_is_refused_and_leaves_nothing(relay: Relay) -> None:
    with pytest.raises(ContextLengthExceeded):
        relay.ask_prefill(KEY, range(NUM_BLOCKS * BLOCK_SIZE))
    assert relay.prefill.is_empty


def test_an_attempt_that_exists_and_requests_of_another_kind_are_refused(relay: Relay) -> None:
    relay.ask_prefill(KEY, PROMPT)
    with pytest.raises(InvalidMessage, match="exists already"):
        relay.ask_prefill(KEY, PROMPT)
    with pytest.raises(InvalidMessage, match="cannot serve Decode"):
        relay.prefill.leg.begin(relay.decode_request(KEY, PROMPT), 0.0)
    assert relay.prefill.leg.num_live == 1


def test_figures_are_reported(relay: Relay) -> None:
    relay.ask(KEY, PROMPT)
    relay.until_finished(KEY)
    found = {metric.name: metric.samples[0].value for metric in relay.prefill.leg.metrics()}
    assert found["baton:kv_send_handoffs"] == found["baton:kv_send_released"] == 1
    assert found["baton:kv_send_blocks"] == 5


def test_token_1_says_when_its_first_chunk_began_and_when_it_was_sampled(relay: Relay) -> None:
    asked_us = now_us()
    relay.ask_prefill(KEY, PROMPT)
    relay.prefill.round(0.0)
    after_first_chunk_us = now_us()
    assert relay.prefill.stream(KEY) == []
    relay.until(lambda: bool(relay.prefill.stream(KEY)))
    times = relay.prefill.times[KEY, 0]
    assert times.ready_us is None
    assert asked_us <= times.begun_us <= after_first_chunk_us <= times.sampled_us <= now_us()
    assert not len(relay.prefill.first_steps)
