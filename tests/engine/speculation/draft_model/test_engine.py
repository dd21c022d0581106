"""A draft model in whole engines: ids and log probabilities are those of decoding without one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton.engine.settings import SHARED
from tests.engine.models.families import make_model
from tests.engine.test_drafts import SIZES, assert_same, built, said
from tests.ranks.executor import thread_ranks


def draft_config(draft: Path, num_tokens: int = 4, **values: Any) -> str:
    return json.dumps({"method": "draft_model", "model": str(draft), "num_speculative_tokens": num_tokens, **values})


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"cpu_kernels": "torch"},
        {"kv_cache_dtype": "fp8"},
        {"num_blocks": 26, "enable_prefix_caching": False},
        {"device": "emulated"},
        {"device": "emulated", "enforce_eager": True},
    ],
    ids=["native", "torch", "fp8", "preempted", "graphs", "asynchronous"],
)
def test_outputs_are_those_of_the_model_alone(tmp_path: Path, settings: dict[str, Any]) -> None:
    make_model(tmp_path, "llama")
    plain = said(built(tmp_path, **settings))
    found = said(built(tmp_path, speculative_config=draft_config(tmp_path), **settings))
    assert_same(plain, found, is_exact=not settings)


def test_ranks_of_one_pool_have_room_for_a_draft(tmp_path: Path) -> None:
    make_model(tmp_path, "llama")
    plain = said(built(tmp_path))
    values: dict[str, Any] = {**SIZES, "rank_pools": SHARED, "speculative_config": draft_config(tmp_path)}
    engine, executor = thread_ranks.built(tmp_path, 2, 1, **values)
    assert engine.memory.layout.num_layers == 4
    assert_same(plain, said(engine), is_exact=False)
    executor.close()
