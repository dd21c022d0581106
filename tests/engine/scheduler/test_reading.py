"""Which rows of prompts a step reads, and when a request leaves that wants nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from baton.engine.cache.block_pool import BlockPool
from baton.engine.scheduler.limits import SchedulerLimits
from baton.engine.scheduler.reading import RowsRead
from baton.engine.scheduler.request import Request
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.step import RequestOutput, SampledToken, Step
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams
from tests.request_keys import A, B


@dataclass(frozen=True)
class Rows:
    """A reading of all rows from `first` on."""

    first: int = 0
    with_tokens: bool = False

    def rows(self, num_prompt_tokens: int) -> range:
        return range(self.first, num_prompt_tokens)


def scheduler(num_blocks: int = 32, budget: int = 8) -> Scheduler:
    return Scheduler(BlockPool(num_blocks, prefix_caching=False), SchedulerLimits(4, 4, budget, 100), frozenset())


def request(key: RequestKey, num_tokens: int, **members: Any) -> Request:
    return Request(key, Prompt.of(range(num_tokens)), DecodingParams(max_tokens=50), b"", 100, **members)


def spans(step: Step) -> list[tuple[RequestKey, int, int]]:
    return [(span.key, span.first_row, span.num_rows) for span in step.spans]


def applied(chosen: Scheduler, step: Step) -> list[RequestOutput]:
    sampled = {share.key: (SampledToken(7, None),) for share in step.requests if share.needs_sample}
    read = {span.key: RowsRead(span.first_row, span.num_rows, b"", True) for span in step.spans}
    return chosen.apply(step, sampled, read)


def next_step(chosen: Scheduler) -> tuple[Step, list[RequestOutput]]:
    step = chosen.schedule()
    chosen.advance(step)
    return step, applied(chosen, step)


def test_a_step_reads_the_rows_of_its_chunk_that_are_asked_for_down_to_the_last_one() -> None:
    chosen = scheduler()
    chosen.add(request(A, 17, reading=Rows(5, with_tokens=True)))
    steps = [next_step(chosen) for _ in range(4)]
    assert [spans(step) for step, _ in steps] == [[(A, 5, 3)], [(A, 8, 8)], [(A, 16, 1)], []]
    outputs = [output for _, (output,) in steps]
    assert [len(output.tokens) for output in outputs] == [0, 0, 1, 1]
    assert [output.read and output.read.num_rows for output in outputs] == [3, 8, 1, None]


def test_without_tokens_a_request_leaves_when_all_is_computed() -> None:
    chosen = scheduler()
    chosen.add(request(A, 10, reading=Rows(9)))
    outputs = [next_step(chosen)[1][0] for _ in range(2)]
    assert [(output.has_left, output.tokens, output.has_failed) for output in outputs] == [
        (False, (), False),
        (True, (), False),
    ]
    assert outputs[1].read == RowsRead(9, 1, b"", True)


def test_what_is_only_to_be_read_keeps_no_prompt_waiting_while_its_last_step_is_in_flight() -> None:
    chosen = scheduler()
    chosen.add(request(A, 4, reading=Rows()))
    chosen.add(request(B, 20))
    chosen.advance(chosen.schedule())
    ahead = chosen.schedule_ahead()
    assert ahead is not None
    assert [(share.key, share.num_tokens) for share in ahead.requests] == [(B, 8)]


def test_a_share_that_is_given_up_for_another_request_reads_nothing() -> None:
    chosen = scheduler(num_blocks=4, budget=7)
    chosen.add(older := request(A, 4))
    chosen.add(request(B, 8, reading=Rows()))
    for _ in range(2):
        next_step(chosen)
    older.token_ids += [7, 7, 7]  # as when its grammar forces them
    step = chosen.schedule()
    assert [share.key for share in step.requests] == [A]
    assert spans(step) == []
