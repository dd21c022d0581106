"""`python -m tests.engine.row_time MODEL`: what rows cost a decode step, as drafts have them: one request, verified.

The medians of a step by its number of rows, computed in turns, and their ratio to one row.
"""

from __future__ import annotations

import argparse
import sys
import time
from statistics import median

from baton.engine.build import build_engine
from baton.engine.runner.kv_memory import allocate_private
from baton.engine.scheduler.request import ScheduledRequest
from baton.engine.scheduler.step import Step
from baton.engine.settings import EngineSettings
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams

_CONTEXT, _BLOCKS, _ROUNDS = 512, 64, 12
_ROWS = (1, 2, 4, 6, 7, 9, 12, 13, 17, 25, 32)


def step_of(num_rows: int) -> Step:
    """A request with a context and `num_rows` - 1 drafts."""
    token_ids = tuple(7 * place % 1000 for place in range(_CONTEXT + 1))
    params = DecodingParams(temperature=0.0)
    table = tuple(range(_BLOCKS))
    share = ScheduledRequest(RequestKey.numbered(1), _CONTEXT, 1, token_ids, Prompt(token_ids), table, params, True)
    return Step((share.with_drafts([5] * (num_rows - 1)) if num_rows > 1 else share,))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.engine.row_time", description=__doc__.splitlines()[0])
    parser.add_argument("model")
    asked = parser.parse_args()
    settings = EngineSettings(asked.model, max_model_len=1024, num_blocks=_BLOCKS, speculative_config="none")
    engine = build_engine(settings, allocate_private)
    seconds: dict[int, list[float]] = {rows: [] for rows in _ROWS}
    for round_ in range(_ROUNDS + 1):
        for rows, found in seconds.items():
            step, begun_s = step_of(rows), time.perf_counter()
            engine.runner.launch(step).result()
            if round_:  # the first of a kind may take longer
                found.append(time.perf_counter() - begun_s)
    for rows, found in seconds.items():
        sys.stdout.write(f"{rows:3} rows: {1000 * median(found):7.2f} ms, {median(found) / median(seconds[1]):.2f}\n")


if __name__ == "__main__":
    main()
