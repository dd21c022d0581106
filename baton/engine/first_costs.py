"""What steps cost before the first request: a few of them are computed when a node starts.

Owns the choice of these steps. They write into blocks that nobody has yet, and what they leave there is never found.
Larger steps follow as long as they are short, so a large model is not kept from starting.
"""

from __future__ import annotations

import time

from baton.engine.runner.base import Runner
from baton.engine.scheduler.limits import SchedulerLimits
from baton.engine.scheduler.request import ScheduledRequest
from baton.engine.scheduler.step import Step
from baton.engine.scheduler.step_costs import StepCosts
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams

MOST_S = 0.05
"""No step follows when those before took so long."""
_SMALLEST = 16
_REPEATS = 2
_DECODES = (1, 4)
_ROWS = (1, 6, 12, 3, 24, 8, 16, 2)
"""The most telling first."""
MOST_ROWS_S = 0.2
"""As `MOST_S`, of steps with drafts, which are computed only where there are any."""


def measure_first_costs(runner: Runner, costs: StepCosts, limits: SchedulerLimits, most_s: float = MOST_S) -> None:
    """Let `costs` learn from prompts of doubling length, and from small batches that decode, within `limits`. Only
    before the first request. `most_s`: of real time, whatever the clock of `costs`."""
    begin_s = time.perf_counter()
    table = tuple(range(-(-limits.max_request_tokens // limits.block_size)))
    most = min(limits.max_num_batched_tokens, limits.max_request_tokens)
    batches = [batch for batch in _DECODES if batch <= limits.max_num_seqs]
    decodes = [Step(tuple(_share(number, 1, 1, table) for number in range(batch))) for batch in batches]
    sizes = [size for size in (_SMALLEST << power for power in range(16)) if size <= most]
    for step in (*decodes, *(Step((_share(0, 0, size, table),)) for size in sizes)):
        for _ in range(_REPEATS):  # the first of a kind may take longer
            if time.perf_counter() - begin_s > most_s:
                break
            costs.launched(step)
            runner.launch(step).result()
            costs.collected()
    costs.know()
    if costs.learns_rows:
        _measure_rows(runner, costs, limits, table)


def _measure_rows(runner: Runner, costs: StepCosts, limits: SchedulerLimits, table: tuple[int, ...]) -> None:
    """Let `costs` learn what rows cost, from one request with drafts."""
    begin_s = time.perf_counter()
    for num_rows in [rows for rows in _ROWS if rows <= limits.max_num_seqs and rows < limits.max_request_tokens]:
        share = _share(0, 1, 1, table)
        step = Step((share.with_drafts([0] * (num_rows - 1)) if num_rows > 1 else share,))
        took_s = []
        for _ in range(_REPEATS):
            step_s = time.perf_counter()
            runner.launch(step).result()
            took_s.append(time.perf_counter() - step_s)
        costs.rows.learn(num_rows, min(took_s))
        if time.perf_counter() - begin_s > MOST_ROWS_S:
            break


def _share(number: int, start: int, num_tokens: int, table: tuple[int, ...]) -> ScheduledRequest:
    params = DecodingParams(temperature=0.0)
    token_ids = (0,) * (start + num_tokens)
    key = RequestKey.numbered(number)
    return ScheduledRequest(key, start, num_tokens, token_ids, Prompt(token_ids), table, params, True)
