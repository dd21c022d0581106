"""A draft model in whole engines: ids and log probabilities are those of decoding without one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton.engine.build import Engine
from baton.engine.settings import SHARED
from tests.checkpoints import make_checkpoint
from tests.engine.models.families import make_model
from tests.engine.test_drafts import SIZES, assert_same, built, said
from tests.ranks.executor import thread_ranks


def draft_config(draft: Path, num_tokens: int = 4, **values: Any) -> str:
    return json.dumps({"method": "draft_model", "model": str(draft), "num_speculative_tokens": num_tokens, **values})


@pytest.fixture(autouse=True)
def _verify_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many drafts pay is a question of time."""
    monkeypatch.setattr("baton.engine.build.DraftDepth", lambda *_: None)


def counts_of(engine: Engine) -> tuple[int, int]:
    """Tokens that were guessed, and those of them that were right."""
    counts = engine.core.draft_counts
    return counts.tokens.total(), counts.accepted.total()


@pytest.mark.parametrize(
    "settings",
    [
        {"batch_invariant": True},
        {"cpu_kernels": "torch"},
        {"kv_cache_dtype": "fp8"},
        {"num_blocks": 26, "enable_prefix_caching": False},
        {"device": "emulated"},
        {"device": "emulated", "enforce_eager": True},
    ],
    ids=["native", "torch", "fp8", "preempted", "graphs", "asynchronous"],
)
def test_a_draft_that_is_the_model_is_right_and_changes_nothing(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Greedy and sampled, with penalties and without: it draws by the noise of the place."""
    make_model(tmp_path, "llama")
    plain = said(built(tmp_path, **settings))
    engine = built(tmp_path, speculative_config=draft_config(tmp_path), **settings)
    found = said(engine)
    assert_same(plain, found, is_exact="batch_invariant" in settings)
    num_drafts, num_accepted = counts_of(engine)
    assert num_drafts > 100
    assert num_accepted > 0.9 * num_drafts
    assert found.num_steps < 0.7 * plain.num_steps


@pytest.mark.parametrize("settings", [{"batch_invariant": True}, {"num_blocks": 26}], ids=["native", "preempted"])
def test_a_draft_that_knows_nothing_changes_nothing(tmp_path: Path, settings: dict[str, Any]) -> None:
    target = make_checkpoint(tmp_path / "target", "llama", vocab_size=320)
    draft = make_checkpoint(tmp_path / "draft", "qwen3", seed=5, vocab_size=320, changes={"num_hidden_layers": 1})
    plain = said(built(target, **settings))
    engine = built(target, speculative_config=draft_config(draft), **settings)
    assert_same(plain, said(engine), is_exact="batch_invariant" in settings)
    num_drafts, num_accepted = counts_of(engine)
    assert num_drafts > 100
    assert num_accepted < 0.2 * num_drafts


def test_ranks_of_one_pool_have_a_draft_on_the_first(tmp_path: Path) -> None:
    make_model(tmp_path, "llama")
    plain = said(built(tmp_path))
    values: dict[str, Any] = {**SIZES, "rank_pools": SHARED, "speculative_config": draft_config(tmp_path)}
    engine, executor = thread_ranks.built(tmp_path, 2, 1, **values)
    assert engine.memory.layout.num_layers == 4
    assert_same(plain, said(engine), is_exact=False)
    executor.close()
    num_drafts, num_accepted = counts_of(engine)
    assert num_accepted > 0.9 * num_drafts > 90
