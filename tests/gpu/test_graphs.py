"""Recorded decode steps against eager ones, on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.gpu_check.checkpoints import FAMILIES, write_checkpoint
from bench.gpu_check.graphs_process import compare, generate, make_requests
from bench.gpu_check.parts_process import Setup, build

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)


SETUP = Setup("cuda", is_quick=False)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_batch_size_draws_the_tokens_of_eager_steps(family: str, dtype: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / family, family)
    requests = make_requests(40)
    eager, recorded = (
        generate(
            build(
                SETUP,
                folder,
                dtype=dtype,
                num_blocks=1024,
                max_model_len=512,
                max_num_seqs=40,
                max_num_batched_tokens=256,
                enforce_eager=enforce_eager,
            ),
            requests,
        )
        for enforce_eager in (True, False)
    )
    found = compare(eager, recorded)
    assert found.num_wrong == 0
    assert found.num_undecided <= len(requests) // 4
