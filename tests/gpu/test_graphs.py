"""Recorded decode steps against eager ones, on a device.

A batch shrinks by one request at a time from its largest size to one, so every bucket of recorded steps is replayed,
with and without padding.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from baton.device.base import Device
from tests.checkpoints import make_checkpoint
from tests.gpu.answers import build, generated, make_requests, require_same
from tests.gpu.conftest import IS_GPU, IS_QUICK

MAX_SEQS = 40 if IS_GPU else 12


@pytest.mark.parametrize("dtype", ["bfloat16"] if IS_QUICK else ["bfloat16", "float32"])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_recorded_steps_draw_the_tokens_of_eager_ones(
    family: str, dtype: str, device: Device, tmp_path: Path, within: Callable[..., None]
) -> None:
    folder = make_checkpoint(tmp_path / family, family, changes={"head_dim": 64})
    requests, num_threads = make_requests(MAX_SEQS), 0 if IS_GPU else 1
    sizes = {"num_blocks": 1024, "max_num_seqs": MAX_SEQS, "num_threads": num_threads, "dtype": dtype}
    eager, recorded = (
        generated(build(folder, **sizes, enforce_eager=enforce_eager).core, requests) for enforce_eager in (True, False)
    )
    parted = require_same(within, eager, recorded, f"batches of {len(requests)} down to 1")
    assert len(parted) <= len(requests) // 4, "too many parted where two tokens were as likely"
