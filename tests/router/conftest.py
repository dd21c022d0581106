"""One tiny checkpoint for all tests of the router: they need its tokenizer and chat template, not its weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.router.http.openai.prompts import PromptMaker
from tests.checkpoints import make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("router") / "tiny", "qwen3", max_position=256)


@pytest.fixture(scope="session")
def prompts(checkpoint: Path) -> Iterator[PromptMaker]:
    found = PromptMaker.from_folder(checkpoint)
    yield found
    found.close()
