"""A real node of a campaign: `node_process.py PROGRAM PROXY_PORT STEP_S STAMPS MODEL FLAG...`.

Some things differ from `python -m baton.prefill_node`, `decode_node` and `node`. It tells its peers the port of a
proxy in place of the port that it listens on (`--port`), and a step takes at least `STEP_S`, so that streams of a tiny
model last long enough for faults to hit them. It aborts when it computes the prompt of `tests.campaign.poison`. It
stamps the tokens that it sends, in the file `STAMPS`. The
disk of its KV tier stalls when the campaign says so. And half of all nodes do not choose between loading and computing.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from baton.engine.attention.base import LayerStored
from baton.engine.runner.base import RunningStep
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.scheduler.step import Step
from baton.wire import links
from tests.campaign import poison, stalled_disk
from tests.campaign.eager_loads import eager
from tests.stations.node_stamps import stamped

PROGRAM, PROXY_PORT, STEP_S = sys.argv[1], sys.argv[2], float(sys.argv[3])
PORT = sys.argv[sys.argv.index("--port") + 1]
_bind, _launch = links.bind, ModelRunner.launch
IS_EAGER = sys.argv[sys.argv.index("--node-id") + 1].endswith(("1", "3"))
_last_s = 0.0


def bind(*args: Any, **options: Any) -> str:
    """See `links.bind`."""
    host, _, port = _bind(*args, **options).rpartition(":")
    return f"{host}:{PROXY_PORT if port == PORT else port}"


@torch.inference_mode()
def launch(runner: ModelRunner, step: Step, layer_stored: LayerStored | None = None) -> RunningStep:
    """See `Runner.launch`."""
    global _last_s
    if any(tuple(each.token_ids[: len(poison.PROMPT)]) == poison.PROMPT for each in step.requests):
        os.abort()
    time.sleep(max(0.0, _last_s + STEP_S - time.monotonic()))
    _last_s = time.monotonic()
    running: RunningStep = _launch(runner, step, layer_stored)
    return running


if __name__ == "__main__":
    main = import_module(f"baton.{PROGRAM}.__main__").main
    with (
        mock.patch.object(links, "bind", bind),
        mock.patch.object(ModelRunner, "launch", launch),
        stamped(Path(sys.argv[4])),
        stalled_disk.obeyed(sys.argv[5:]),
        eager() if IS_EAGER else contextlib.nullcontext(),
    ):
        sys.exit(main(sys.argv[5:]))
