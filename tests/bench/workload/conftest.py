from __future__ import annotations

import shutil

import pytest
import tokenizers
from tokenizers import processors

from baton.bench.workload.passages import Vocabulary, vocabulary_of
from baton.demo.location import checkpoint_path

OPENING_ID = 0


@pytest.fixture(scope="session")
def words() -> Vocabulary:
    """A real vocabulary that has many whole words."""
    return vocabulary_of(checkpoint_path())


@pytest.fixture(scope="session")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    """The same, with one token (OPENING_ID) that begins each text."""
    folder = tmp_path_factory.mktemp("opened") / "checkpoint"
    shutil.copytree(checkpoint_path(), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    name = backend.id_to_token(OPENING_ID)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{name} $A", pair=f"{name} $A $B", special_tokens=[(name, OPENING_ID)]
    )
    backend.save(str(folder / "tokenizer.json"))
    return vocabulary_of(folder)
