"""OpenVINO's prompts and decode steps for `baton.bench.limits.step_turns`, with a Python that has `openvino` and numpy:

    python bench/limits/openvino_steps_process.py FOLDER

FOLDER is made by `optimum-cli export openvino --model CHECKPOINT --task text-generation-with-past --weight-format fp16
FOLDER`. It computes in bfloat16 and keeps its KV so. A step's sequences have each computed their context: no KV is
shared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

import numpy as np
import openvino

_NUM_PROMPTS, _NUM_STEPS = 3, 24
_PIECE = 32
"""Tokens of each sequence that are computed at once before steps are measured."""
_SETTINGS = {
    "PERFORMANCE_HINT": "LATENCY",
    "ENABLE_CPU_PINNING": False,
    "INFERENCE_PRECISION_HINT": "bf16",
    "KV_CACHE_PRECISION": "bf16",
}


class Steps:
    """One compiled model, and the state of the sequences of one measurement."""

    def __init__(self, folder: str, num_threads: int) -> None:
        settings = {**_SETTINGS, "INFERENCE_NUM_THREADS": num_threads}
        self._model = openvino.Core().compile_model(f"{folder}/openvino_model.xml", "CPU", settings)
        self._inputs = [each.get_any_name() for each in self._model.inputs]
        self._chance = np.random.default_rng(0)
        self._request: Any = None
        self._num_tokens = 0

    def begin(self) -> None:
        """Forget all sequences."""
        self._request, self._num_tokens = self._model.create_infer_request(), 0

    def step_s(self, batch: int, count: int) -> float:
        """Seconds in which `batch` sequences compute `count` tokens each."""
        first, last = self._num_tokens, self._num_tokens + count
        inputs: dict[str, Any] = {
            "input_ids": self._chance.integers(10, 7000, (batch, count)).astype(np.int64),
            "attention_mask": np.ones((batch, last), np.int64),
            "beam_idx": np.arange(batch, dtype=np.int32),
        }
        if "position_ids" in self._inputs:
            inputs["position_ids"] = np.tile(np.arange(first, last), (batch, 1)).astype(np.int64)
        begun_s = time.perf_counter()
        self._request.infer(inputs)
        self._num_tokens = last
        return time.perf_counter() - begun_s


def main() -> int:
    """Measure and print lines of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompts", default="")
    parser.add_argument("--steps", default="")
    flags = parser.parse_args()
    steps = Steps(flags.folder, flags.threads)
    for length in filter(None, flags.prompts.split(",")):
        times = []
        for _ in range(_NUM_PROMPTS):
            steps.begin()
            times.append(steps.step_s(1, int(length)))
        _say(length, min(times))
    for case in filter(None, flags.steps.split(",")):
        batch, context = map(int, case.split("x"))
        steps.begin()
        for first in range(0, context, _PIECE):  # this model gives the logits of every token: all at once are 10 GB
            steps.step_s(batch, min(_PIECE, context - first))
        _say(case, statistics.median(steps.step_s(batch, 1) for _ in range(_NUM_STEPS)))
    return 0


def _say(case: str, seconds: float) -> None:
    sys.stdout.write(json.dumps({"case": case, "seconds": seconds}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
