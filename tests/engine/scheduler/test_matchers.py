"""A request whose grammar is not compiled yet waits, and nothing waits with it; its matcher follows its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from baton.engine.cache.block_pool import BlockPool
from baton.engine.scheduler.limits import SchedulerLimits
from baton.engine.scheduler.request import GrammarPlace, Matcher, Request
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.step import SampledToken
from baton.wire.grammar import Grammar
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams
from tests.request_keys import key_of

A, B = key_of("a"), key_of("b")
GRAMMAR = Grammar.regex("a")


class FakeMatcher:
    """Complete after `length` tokens. `refused`: a token that may stand nowhere; `refused_late`: one of which that is
    known only when it is to be taken. See `Matcher`."""

    def __init__(self, length: int = 3, output: Sequence[int] = (), is_ready: bool = True) -> None:
        self.is_ready = is_ready
        self.error = ""
        self.output = list(output)
        self.forced: list[int] = []
        self.refused = self.refused_late = -1
        self._length = length
        self._drafts: list[int] = []

    @property
    def is_complete(self) -> bool:
        return len(self.output) >= self._length

    @property
    def leaves_choice(self) -> bool:
        return not self.forced

    def accepts(self, token_id: int) -> bool:
        return token_id != self.refused_late

    def goes_on_with(self, token_id: int) -> bool:
        return self.leaves_choice and len(self.output) + 1 < self._length

    def take(self, token_id: int) -> None:
        self.output.append(token_id)

    def forced_token(self) -> int | None:
        return self.forced.pop(0) if self.forced else None

    def fork(self, output: Sequence[int]) -> Matcher:
        return FakeMatcher(self._length, output)

    def num_allowed(self, drafts: Sequence[int]) -> int:
        allowed = list(takewhile(lambda token_id: token_id != self.refused, drafts))
        self._drafts = allowed[: max(0, self._length - len(self.output) - 1)]
        return len(self._drafts)

    def behind(self, number: int) -> GrammarPlace:
        return self.fork([*self.output, *self._drafts[:number]])

    def mask(self) -> bytes | None:
        return b"\xff"

    def fail(self, reason: str) -> None:
        self.error = reason


def _scheduler() -> Scheduler:
    return Scheduler(BlockPool(32, prefix_caching=False), SchedulerLimits(4, 4, 16, 64), frozenset())


def _request(key: RequestKey, matcher: Matcher | None = None) -> Request:
    params = DecodingParams(max_tokens=9, grammar=None if matcher is None else GRAMMAR)
    return Request(key, Prompt.of(range(5)), params, b"", 64, matcher=matcher)


def _step(scheduler: Scheduler, token_id: int) -> list[str]:
    """Compute a step that samples this token for everyone; the finish reasons."""
    step = scheduler.schedule()
    scheduler.advance(step)
    outputs = scheduler.apply(step, {share.key: (SampledToken(token_id, None),) for share in step.requests})
    for output in outputs:
        if output.has_left:
            scheduler.requests.remove(output.key)
    return [output.finish_reason for output in outputs]


def test_a_request_that_is_not_ready_holds_nobody_up() -> None:
    scheduler, slow = _scheduler(), FakeMatcher(is_ready=False)
    scheduler.add(_request(A, slow))
    assert scheduler.schedule().requests == ()
    assert scheduler.requests.first_without_blocks is None
    scheduler.add(_request(B))
    assert scheduler.requests.awaits_readiness
    assert [share.key for share in scheduler.schedule().requests] == [B]
    slow.is_ready = True
    assert not scheduler.requests.awaits_readiness
    assert [share.key for share in scheduler.schedule().requests] == [B, A]


def test_a_complete_output_ends_with_the_token_that_completes_it() -> None:
    scheduler, matcher = _scheduler(), FakeMatcher(length=3)
    scheduler.add(_request(A, matcher))
    assert [_step(scheduler, token_id) for token_id in (7, 8, 9)] == [[""], [""], ["complete"]]
    assert matcher.output == [7, 8, 9]
    assert scheduler.requests.is_empty


def test_steps_in_a_grammar_are_a_series_until_it_forces_a_token_or_is_complete() -> None:
    scheduler, matcher = _scheduler(), FakeMatcher(length=8)
    scheduler.add(_request(A, matcher))
    scheduler.add(_request(B))
    numbers = []
    for token_id in range(9):
        if token_id == 4:
            matcher.forced = [30]
        step = scheduler.schedule()
        numbers.append((step.number, len(step.shares), step.num_tokens))
        scheduler.advance(step)
        for output in scheduler.apply(step, {share.key: (SampledToken(token_id, None),) for share in step.requests}):
            if output.has_left:
                scheduler.requests.remove(output.key)
    # two prompts, a series that a forced token ends, the step that computes it, and one until A is complete
    prompts, series, last = [(0, 2, 10)], [(0, 2, 2), (1, 2, 2), (2, 2, 2), (3, 2, 2)], [(0, 1, 1), (1, 1, 1)]
    assert numbers == [*prompts, *series, (0, 2, 3), (0, 2, 2), *last]
    assert matcher.output == [0, 1, 2, 3, 4, 30, 5, 6]


def test_a_request_in_a_grammar_is_left_out_until_its_token_is_known() -> None:
    scheduler = _scheduler()
    scheduler.add(_request(A, FakeMatcher()))
    scheduler.add(_request(B))
    first = scheduler.schedule()
    scheduler.advance(first)
    ahead = scheduler.schedule_ahead()
    assert ahead is not None
    assert [share.key for share in ahead.requests] == [B]


def test_a_token_that_is_missing_has_the_reason_of_the_matcher() -> None:
    scheduler, matcher = _scheduler(), FakeMatcher()
    scheduler.add(_request(A, matcher))
    step = scheduler.schedule()
    scheduler.advance(step)
    matcher.fail("too complex")
    (output,) = scheduler.apply(step, {})
    assert (output.has_failed, output.failure) == (True, "too complex")
