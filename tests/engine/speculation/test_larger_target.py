"""A larger target is a checkpoint as others are, and says what its real model says where its copies add nothing."""

from __future__ import annotations

import json
from pathlib import Path

from baton import LLM, SamplingParams
from tests.checkpoints import make_checkpoint
from tests.engine.speculation.larger_target import make_larger

_PROMPT = tuple(range(5, 45))
_GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


def said(folder: Path) -> tuple[int, ...]:
    return LLM(str(folder), num_threads=1, num_blocks=16).generate(list(_PROMPT), _GREEDY)[0].token_ids


def test_copies_that_add_nothing_change_nothing_and_others_do(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "real", "llama")
    make_larger(model, tmp_path / "same", 3, 1e-9)
    make_larger(model, tmp_path / "other", 3, 1.0)
    layers = [json.loads((folder / "config.json").read_text())["num_hidden_layers"] for folder in tmp_path.iterdir()]
    assert max(layers) == 3 * min(layers)
    assert said(tmp_path / "same") == said(model) != said(tmp_path / "other")
