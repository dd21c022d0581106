from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

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


@pytest.fixture(scope="session")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    """No words, only runs of letters: random ids come back from their text as other ids, and as more."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    letters = np.random.default_rng(0).choice(list("abcdefgh"), size=(400, 12))
    backend.train_from_iterator(map("".join, letters), trainers.BpeTrainer(vocab_size=200, show_progress=False))
    backend.add_special_tokens(["<end>"])
    folder: Path = tmp_path_factory.mktemp("pieces")
    backend.save(str(folder / "tokenizer.json"))
    return vocabulary_of(folder)
