"""A prefill and a decode node on one GPU: token by token what transformers gives, over each transport."""

from __future__ import annotations

import pytest
import torch

from bench.gpu_check.parts_process import Setup, Unavailable
from bench.gpu_check.plan import TRANSPORTS
from bench.gpu_check.rows import Row, Verdict
from bench.gpu_check.served_process import ServedBench
from bench.gpu_check.transfer_process import TransferBench

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)


SETUP = Setup("cuda", is_quick=True)


def require_ok(rows: list[Row]) -> None:
    """Every row about correctness is right."""
    judged = [row for row in rows if not row.is_speed]
    assert judged
    assert [row for row in judged if row.verdict != Verdict.OK] == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize("transport", [*TRANSPORTS, "divergence"])
def test_a_relay_answers_as_transformers_does(transport: str) -> None:
    bench = ServedBench(SETUP, in_parallel=False)
    try:
        require_ok(bench.check(transport))
    except Unavailable:
        if transport != "nccl":
            raise
    finally:
        bench.close()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("transport", TRANSPORTS[1:])
def test_blocks_arrive_byte_by_byte(transport: str) -> None:
    try:
        require_ok(TransferBench(SETUP).check(transport))
    except Unavailable:
        if transport != "nccl":
            raise
