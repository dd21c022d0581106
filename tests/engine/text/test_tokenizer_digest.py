"""The digest of a tokenizer says whether two checkpoints give tokens the same texts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from baton.engine.text.tokenizer_digest import tokenizer_digest
from tests.checkpoints import make_checkpoint


def test_the_digest_is_that_of_the_vocabulary(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "a", "llama")
    digest = tokenizer_digest(checkpoint)
    assert len(digest) == 32
    copy = Path(shutil.copytree(checkpoint, tmp_path / "b"))
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": "another"}))
    assert tokenizer_digest(copy) == digest
    (copy / "tokenizer.json").write_text((copy / "tokenizer.json").read_text() + " ")
    assert tokenizer_digest(copy) != digest


def test_a_folder_without_a_tokenizer_has_no_digest(tmp_path: Path) -> None:
    assert tokenizer_digest(tmp_path) == ""
