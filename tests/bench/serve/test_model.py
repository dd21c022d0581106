from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton.bench.serve.server import tokenizer_folder, vocabulary_for
from baton.bench.serve.settings import ServeBenchSettings
from baton.demo.location import DEMO_MODEL_NAME, checkpoint_path
from baton.wire.errors import InvalidSetting


def test_the_tokenizer_is_that_of_the_flag_else_of_the_model_else_of_the_served_name(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    both = ServeBenchSettings(tokenizer=str(one), model=str(two))
    assert tokenizer_folder(both, "x") == one
    assert tokenizer_folder(ServeBenchSettings(model=str(two)), "x") == two
    assert tokenizer_folder(ServeBenchSettings(model="name"), str(one)) == one
    assert tokenizer_folder(ServeBenchSettings(), DEMO_MODEL_NAME) == checkpoint_path()
    assert tokenizer_folder(ServeBenchSettings(), "x") is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "--tokenizer"),
        ({"vocab_size": 50, "prompt_form": "text"}, "--vocab-size"),
        ({"vocab_size": 50, "backend": "openai-chat"}, "--vocab-size"),
    ],
)
def test_without_tokens_or_text_to_send_it_says_what_is_missing(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidSetting, match=words):
        vocabulary_for(ServeBenchSettings(**changes), "unknown")
