"""OpenVINO's prompts, decode steps and perplexity, with a Python that has `openvino` and numpy:

    PYTHON -m tests.peers.openvino_engine FOLDER --threads 2 --prompts 512 --steps 1x512

FOLDER is what `optimum-cli export openvino` wrote. Settings are OpenVINO's own, as its GenAI library and model server
use them on a CPU: products with activations rounded to 8 bits in groups, KV in 8 bits. Like GenAI, the head computes
the last token of a prompt alone; only the perplexity needs all.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import openvino
from openvino import opset13

from tests.peers.work import Work, measure

_PIECE = 64
"""Tokens of each sequence that are computed at once before steps are measured."""


class OpenVino:
    """See `tests.peers.work.Engine`."""

    def __init__(self, work: Work) -> None:
        self._file = f"{work.model}/openvino_model.xml"
        self._settings = {
            "PERFORMANCE_HINT": "LATENCY",
            "ENABLE_CPU_PINNING": False,
            "INFERENCE_NUM_THREADS": work.num_threads,
            **dict(each.split("=", 1) for each in work.rest),
        }

    def prompt_s(self, token_ids: Sequence[int]) -> float:
        return _Sequences(self._short).compute(np.array([token_ids]))[1]

    def steps_s(self, prompts: Sequence[Sequence[int]], num_steps: int) -> list[float]:
        sequences, ids = _Sequences(self._short), np.array(prompts)
        for first in range(0, ids.shape[1], _PIECE):
            sequences.compute(ids[:, first : first + _PIECE])
        return [sequences.compute(ids[:, place : place + 1])[1] for place in range(num_steps)]

    def log_probabilities(self, token_ids: Sequence[int]) -> Sequence[float]:
        logits = _Sequences(self._full).compute(np.array([token_ids]))[0][0].astype(np.float64)
        logits -= logits.max(-1, keepdims=True)
        found = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        return [float(found[place, token_id]) for place, token_id in enumerate(token_ids[1:])]

    @cached_property
    def _full(self) -> Any:
        return openvino.Core().compile_model(self._file, "CPU", self._settings)

    @cached_property
    def _short(self) -> Any:
        """The model whose head computes the last of the tokens that it is given."""
        core = openvino.Core()
        model = core.read_model(self._file)
        node = model.get_results()[0]
        while node.get_type_name() != "MatMul":
            node = node.input_value(0).get_node()
        hidden = node.input_value(0)
        last = opset13.gather(hidden, opset13.constant([-1], np.int64), opset13.constant(1, np.int64))
        node.input(0).replace_source_output(last.output(0))
        model.validate_nodes_and_infer_types()
        return core.compile_model(model, "CPU", self._settings)


class _Sequences:
    """Sequences of equal lengths that a compiled model computes, with their KV."""

    def __init__(self, compiled: Any) -> None:
        self._inputs = {each.get_any_name() for each in compiled.inputs}
        self._request, self._length = compiled.create_infer_request(), 0

    def compute(self, ids: Any) -> tuple[Any, float]:
        """Logits of the next tokens [sequences, tokens], and the seconds that they took."""
        batch, count = ids.shape
        last = self._length + count
        inputs: dict[str, Any] = {
            "input_ids": ids.astype(np.int64),
            "attention_mask": np.ones((batch, last), np.int64),
            "beam_idx": np.arange(batch, dtype=np.int32),
        }
        if "position_ids" in self._inputs:
            inputs["position_ids"] = np.tile(np.arange(self._length, last), (batch, 1)).astype(np.int64)
        begun_s = time.perf_counter()
        found = self._request.infer(inputs, share_inputs=True, share_outputs=True)[0]
        self._length = last
        return found, time.perf_counter() - begun_s


if __name__ == "__main__":
    measure(OpenVino)
