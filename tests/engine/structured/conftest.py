"""A tiny checkpoint: its tokenizer has every byte, and its weights are random."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.engine.structured.vocabulary import Vocabulary
from baton.engine.text.tokenizer import Tokenizer
from tests.checkpoints import make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("structured"), "qwen2")


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_folder(checkpoint)


@pytest.fixture(scope="session")
def vocabulary(checkpoint: Path, tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary.from_folder(checkpoint, tokenizer.eos_token_ids)
