from __future__ import annotations

from pathlib import Path

import pytest
import torch

import baton.demo
from tests.engine.models.perplexity import Kind, both, perplexity, token_ids
from tests.engine.native.compiled import needs_kernels

FOLDER = Path(baton.demo.__file__).parent / "checkpoint"


@pytest.mark.parametrize("rounds", [False, pytest.param(True, marks=needs_kernels)])
@pytest.mark.parametrize("setting", ["int8", "int4"])
def test_text_is_as_likely_as_with_the_dequantized_weights(setting: str, rounds: bool) -> None:
    ids = token_ids(FOLDER, 2, 96)
    found, reference = both(Kind("", FOLDER, setting, rounds=rounds), torch.bfloat16, ids)
    assert perplexity(found, ids) == pytest.approx(perplexity(reference, ids), rel=0.01)
