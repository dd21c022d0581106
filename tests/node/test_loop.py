"""The engine loop around steps: when it waits, and what it does with steps that fail."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from baton.device.base import DeviceFailed
from baton.engine.attention.base import LayerStored
from baton.engine.cache.block_pool import BlockPool, CacheChanges
from baton.engine.core import EngineCore
from baton.engine.scheduler.limits import SchedulerLimits
from baton.engine.scheduler.reading import RowsRead
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.step import RequestOutput, SampledToken, SampledTokens, Step
from baton.node.borrower import Arrived
from baton.node.heartbeat import HeartbeatThread
from baton.node.lent_cores import LentCores
from baton.node.loop import EngineLoop, LoopLeg
from baton.node.router_links import Heard, RouterLinks
from baton.node.stopper import Stopper
from baton.wire.errors import BatonError
from baton.wire.messages.legs import Decode, HandOver
from baton.wire.messages.membership import Drain
from baton.wire.messages.output import HandoffFigures, TokenEvent
from baton.wire.messages.prefixes import Lend
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams

KEY = RequestKey(b"h" * 16, 1)
FOUR_TOKENS = DecodingParams(max_tokens=4, ignore_eos=True)


@dataclass
class Runner:
    """Samples token 1. `errors`: by number of the launch, raised as its result."""

    is_asynchronous: bool = True
    errors: dict[int, Exception] = field(default_factory=dict)
    num_launched: int = 0
    read_is_valid: bool = True

    def launch(self, step: Step, layer_stored: LayerStored | None = None) -> Launched:
        self.num_launched += 1
        tokens = {share.key: (SampledToken(1, None),) for share in step.requests if share.needs_sample}
        read = {
            span.key: RowsRead(span.first_row, span.num_rows, bytes(8 * span.num_rows), self.read_is_valid)
            for span in step.spans
        }
        return Launched(tokens, self.errors.pop(self.num_launched, None), read)


@dataclass
class Launched:
    tokens: Mapping[RequestKey, SampledTokens]
    error: Exception | None
    read: dict[RequestKey, RowsRead]

    def result(self) -> Mapping[RequestKey, SampledTokens]:
        if self.error is not None:
            raise self.error
        return self.tokens

    def rows_read(self) -> Mapping[RequestKey, RowsRead]:
        return self.read


@dataclass
class ListeningLeg:
    """Records the calls of the loop, in order."""

    core: EngineCore
    heard: list[str] = field(default_factory=list)
    num_live: int = 0
    arrived: list[Arrived] = field(default_factory=list)

    def watch(self, step: Step) -> None:
        self.heard.append("watch")

    def applied(self, outputs: Sequence[RequestOutput], now_s: float) -> list[TokenEvent]:
        self.heard.append(f"applied {len(outputs)}")
        return []

    def lost(self, error: BatonError, now_s: float) -> None:
        self.heard.append("lost")

    def fail(self, key: RequestKey, error: BatonError, now_s: float) -> None:
        self.heard.append("fail")
        self.core.abort(key)

    def wait_on(self) -> list[Any]:
        return []

    def take_failures(self) -> list[Any]:
        return []

    def take_arrived(self) -> list[Arrived]:
        arrived, self.arrived = self.arrived, []
        return arrived

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


class Quiet:
    """A router, a heartbeat and a stopper that have nothing to say."""

    sockets = ()
    wakeup = None
    is_asked = owe_pong = False

    def receive(self, now_s: float) -> list[Heard]:
        return []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


@dataclass
class Noting(Quiet):
    """A router that notes what it is told."""

    told: list[str]

    def send_read(self, key: RequestKey, read: RowsRead) -> None:
        self.told.append("read")

    def send_tokens(self, events: Sequence[TokenEvent]) -> None:
        self.told.append("tokens")


class Asking(Quiet):
    """A router that asks for `requests` in the first round, and hears that this node leaves in the second one. `said`:
    what it was told."""

    def __init__(self, *requests: object) -> None:
        self.requests = list(requests)
        self.said: list[object] = []
        self.has_heard = False

    def receive(self, now_s: float) -> list[Heard]:
        self.has_heard = "leave" in self.said
        requests, self.requests = self.requests, []
        return [Heard(cast(Any, self), requests)]

    def send_handed_over(self, order: HandOver, num_tokens: int) -> None:
        self.said.append((order, num_tokens))

    def leave(self, now_s: float) -> None:
        self.said.append("leave")

    def has_left(self, now_s: float) -> bool:
        return self.has_heard


@dataclass
class ServingLeg(ListeningLeg):
    """Serves one request at a time, which `hand_over` takes away."""

    def begin(self, request: object, now_s: float) -> None:
        self.heard.append("begin")
        self.num_live = 1

    def hand_over(self, order: HandOver, now_s: float) -> int:
        self.num_live = 0
        return 41


class Over(Exception):
    """So many rounds were enough."""


@dataclass
class Rig:
    """A loop whose waits are noted instead of waited."""

    core: EngineCore
    runner: Runner
    leg: ListeningLeg
    waits_ms: list[int] = field(default_factory=list)
    cores: LentCores = field(default_factory=lambda: LentCores(None))
    now_s: float = 0.0
    told: list[str] = field(default_factory=list)

    def run(self, num_rounds: int, at: Mapping[int, Callable[[], object]] | None = None) -> None:
        """`at`: what to do before a round, by its number from 0."""
        quiet = Quiet()
        loop = EngineLoop(
            self.core,
            cast(LoopLeg, self.leg),
            cast(RouterLinks, Noting(self.told)),
            cast(HeartbeatThread, quiet),
            cast(Stopper, quiet),
            clock=lambda: self.now_s,
            cores=self.cores,
        )
        rounds = iter(range(num_rounds))

        def each_round() -> None:
            number = next(rounds, None)
            if number is None:
                raise Over
            (at or {}).get(number, lambda: None)()

        with pytest.raises(Over):
            loop.run(each_round)


@dataclass
class Loans:
    """Writes down what is lent. Somebody wants the cores all the time."""

    said: list[float | str] = field(default_factory=list)

    def give(self, for_s: float = -1.0) -> None:
        self.said.append(for_s)

    def take_back(self) -> None:
        self.said.append("back")

    def is_wanted(self, within_s: float) -> bool:
        return True


class Resting(LentCores):
    """Wants to rest for two seconds after each step."""

    def rest_s(self, step_s: float) -> float:
        return 2.0


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    pool, runner = BlockPool(16), Runner()
    core = EngineCore(pool, Scheduler(pool, SchedulerLimits(4, 4, 16, 64), frozenset()), runner, "f")
    rig = Rig(core, runner, ListeningLeg(core))

    class Poller:
        def register(self, source: object, flags: int) -> None:
            pass

        def poll(self, timeout_ms: int) -> None:
            rig.waits_ms.append(timeout_ms)

    monkeypatch.setattr("baton.node.loop.zmq.Poller", Poller)
    return rig


def loop_of(rig: Rig, leg: ListeningLeg, router: Asking, stopper: Stopper) -> EngineLoop:
    heartbeat = cast(HeartbeatThread, Quiet())
    return EngineLoop(rig.core, cast(LoopLeg, leg), cast(RouterLinks, router), heartbeat, stopper)


def test_an_idle_node_gives_its_pool_memory_and_does_not_wait_meanwhile(rig: Rig) -> None:
    given: list[int] = []
    pool = BlockPool(5, give_memory=lambda first, end: given.extend(range(first, end)))
    rig.core = EngineCore(pool, Scheduler(pool, SchedulerLimits(4, 4, 16, 64), frozenset()), rig.runner, "f")
    rig.run(5)
    assert given == [0, 1, 2, 3, 4]
    assert rig.waits_ms == [250, 0, 0, 0, 250]


def test_a_node_with_work_gives_its_pool_no_memory_beyond_what_that_needs(rig: Rig) -> None:
    given: list[int] = []
    pool = BlockPool(16, give_memory=lambda first, end: given.extend(range(first, end)))
    rig.core = EngineCore(pool, Scheduler(pool, SchedulerLimits(4, 4, 16, 64), frozenset()), rig.runner, "f")
    rig.core.add(RequestKey.numbered(1), Prompt.of([1, 2, 3, 4, 5]), DecodingParams(max_tokens=50))
    rig.run(1)
    assert given == [0, 1]


def test_a_drained_node_ends_when_it_has_handed_over_and_the_router_has_heard_it(rig: Rig) -> None:
    order = HandOver(b"h" * 16, 1, 2, "e", 5)
    router, leg = Asking(Drain(starts_again=False)), ServingLeg(rig.core, num_live=1)
    rounds: list[int] = []

    def each_round() -> None:
        rounds.append(leg.num_live)
        if len(rounds) == 4:
            router.requests.append(order)

    with Stopper(30.0) as stopper:
        loop_of(rig, leg, router, stopper).run(each_round)
        assert stopper.stays_away
    assert router.said == ["leave", (order, 41)]
    assert rounds == [1, 1, 1, 1]


def test_an_idle_node_waits_until_the_router_knows_that_it_leaves_and_takes_what_was_sent_before(rig: Rig) -> None:
    leg_on_its_way = Decode(b"h" * 16, 1, Prompt((1,)), FOUR_TOKENS, None)
    router, leg = Asking(), ServingLeg(rig.core)
    num_rounds = 0

    def each_round() -> None:
        nonlocal num_rounds
        num_rounds += 1
        if num_rounds == 1:
            stopper.ask(0.0, starts_again=True)
        if num_rounds == 2:
            router.requests.append(leg_on_its_way)
        if num_rounds == 5:
            leg.num_live = 0

    with Stopper(1e9) as stopper:
        loop_of(rig, leg, router, stopper).run(each_round)
    assert leg.heard == ["begin"]
    assert num_rounds == 5


def test_the_loop_does_not_wait_while_a_step_is_in_flight(rig: Rig) -> None:
    rig.core.add(KEY, Prompt.of([1, 2, 3]), FOUR_TOKENS)
    rig.run(7)
    assert rig.leg.heard == ["watch", "watch", *["applied 1", "watch"] * 2, "applied 1", "applied 1"]
    assert [wait_ms > 0 for wait_ms in rig.waits_ms] == [True, False, False, False, False, True, True]


def test_cores_are_lent_while_the_loop_waits_for_something_to_do_and_not_between_steps(rig: Rig) -> None:
    loans = Loans()
    rig.cores = LentCores(loans)
    rig.core.add(KEY, Prompt.of([1, 2, 3]), FOUR_TOKENS)
    rig.run(7)
    assert loans.said == [-1.0, "back", *["back"] * 4, -1.0, "back", -1.0, "back"]


def test_a_node_that_rests_lends_its_cores_for_so_long_and_steps_no_sooner(rig: Rig) -> None:
    loans = Loans()
    rig.cores = Resting(loans)

    def pass_on(now_s: float) -> Callable[[], None]:
        return lambda: setattr(rig, "now_s", now_s)

    rig.core.add(KEY, Prompt.of([1, 2, 3]), FOUR_TOKENS)
    rig.run(6, at={2: pass_on(1.5), 3: pass_on(1.9999), 4: pass_on(2.0)})
    # something came in rounds 1 to 3, or the wait was over too soon
    assert rig.leg.heard == ["watch", "watch", "applied 1", "watch", "applied 1"]
    assert loans.said == [-1.0, "back", 2.0, "back", 0.5, "back", 0.001, "back", "back", 2.0, "back"]


def test_a_step_whose_requests_were_all_aborted_is_collected_without_waiting(rig: Rig) -> None:
    rig.core.add(KEY, Prompt.of([1, 2, 3]), FOUR_TOKENS)
    rig.run(5, at={2: lambda: rig.core.abort(KEY)})
    assert rig.leg.heard[-1] == "applied 0"
    assert [wait_ms > 0 for wait_ms in rig.waits_ms] == [True, False, False, False, True]
    assert rig.core.status().num_held_blocks == 0


def test_steps_that_are_lost_are_told_once_and_their_requests_fail(rig: Rig) -> None:
    rig.core.add(KEY, Prompt.of([1, 2, 3]), FOUR_TOKENS)
    rig.runner.errors[2] = OSError("lost")
    rig.run(4)
    assert rig.leg.heard == ["watch", "watch", "applied 1", "watch", "lost", "fail"]
    assert not rig.core.has_work


def test_a_lost_device_ends_the_loop_with_its_message(rig: Rig) -> None:
    rig.core.add(KEY, Prompt.of([1, 2, 3]), FOUR_TOKENS)
    rig.runner.errors[2] = DeviceFailed("the device is gone")
    with pytest.raises(DeviceFailed, match="gone"):
        rig.run(4)
    assert "fail" not in rig.leg.heard


@pytest.mark.parametrize("is_valid", [True, False])
def test_what_was_read_is_told_before_the_tokens_and_fails_its_request_if_it_is_no_number(
    rig: Rig, is_valid: bool
) -> None:
    rig.runner.read_is_valid = is_valid
    rig.core.add(KEY, Prompt.of([1, 2, 3]), DecodingParams(max_tokens=1, prompt_logprobs=0))
    rig.run(3)
    assert ("fail" in rig.leg.heard) is not is_valid
    assert rig.told == (["read", "tokens"] if is_valid else ["tokens"])


def test_a_node_answers_how_much_it_lends_and_tells_of_a_prefix_before_a_step_behind_what_its_cache_has_gained(
    rig: Rig,
) -> None:
    order = Lend(b"h" * 16, 2, Prompt((1, 2)), "e", 5)
    router, leg = Sharing(order, Drain(starts_again=False)), LendingLeg(rig.core)
    leg.arrived.append(Arrived(RequestKey(b"h" * 16, 3), 8, HandoffFigures(2, 80, 10, 5)))
    rig.core.take_cache_changes = lambda: CacheChanges([bytes(16)], [])  # type: ignore[method-assign]
    rig.core.add(KEY, Prompt.of([1, 2, 3]), DecodingParams(max_tokens=1))
    with Stopper(30.0) as stopper:
        loop_of(rig, leg, router, stopper).run(lambda: None)
    assert router.said[:4] == [(order, 4), "cache", 8, "tokens"]


class Sharing(Asking):
    """A router that is told about prefixes."""

    def send_lent(self, order: Lend, num_tokens: int) -> None:
        self.said.append((order, num_tokens))

    def send_cache_changes(self, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        self.said.append("cache")

    def send_tokens(self, events: Sequence[TokenEvent]) -> None:
        self.said.append("tokens")

    def send_pulled(self, arrived: Arrived) -> None:
        self.said.append(arrived.num_tokens)


class LendingLeg(ListeningLeg):
    """Has half of what it is asked for."""

    def lend(self, order: Lend, now_s: float) -> int:
        return 4
