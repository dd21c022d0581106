"""Prompts for a text in the middle have the form in which each family was trained."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import tokenizers

from baton.engine.text.fill_in_middle import FillInMiddle
from baton.engine.text.tokenizer import Tokenizer

PREFIX, SUFFIX = "def add(a, b):\n", "    return total\n"
BYTE_LEVEL_FAMILIES = [
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<\uff5cfim▁begin\uff5c>", "<\uff5cfim▁hole\uff5c>", "<\uff5cfim▁end\uff5c>"),
]


def _with(folder: Path, *names: str) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens([tokenizers.AddedToken(name, normalized=False) for name in names])
    return Tokenizer(backend, bos_token_id=Tokenizer.from_folder(folder).bos_token_id)


@pytest.mark.parametrize("names", BYTE_LEVEL_FAMILIES)
def test_the_prompt_is_prefix_suffix_middle(names: tuple[str, str, str], checkpoints: Mapping[str, Path]) -> None:
    tokenizer = _with(checkpoints["byte_level"], *names)
    middle = FillInMiddle.find(tokenizer)
    assert middle is not None
    written = f"{names[0]}{PREFIX}{names[1]}{SUFFIX}{names[2]}"
    assert tokenizer.decode(middle.prompt(tokenizer, PREFIX, SUFFIX), skip_special_tokens=False) == written
    assert middle.prompt(tokenizer, PREFIX, SUFFIX) == tokenizer.encode(written)
    assert middle.stop_ids == ()


def test_the_suffix_of_codellama_has_no_space_before_it(checkpoints: Mapping[str, Path]) -> None:
    tokenizer = _with(checkpoints["llama"], "▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>")
    middle = FillInMiddle.find(tokenizer)
    assert middle is not None
    ids = middle.prompt(tokenizer, "one", "two")
    hole = ids.index(middle.hole_id)
    pieces = [tokenizer.vocabulary_piece(token_id) or "" for token_id in ids]
    assert ids[0] == tokenizer.bos_token_id
    assert ids[1] == middle.begin_id
    assert ids[-1] == middle.end_id
    assert "".join(pieces[2:hole]) == "▁one"
    assert "".join(pieces[hole + 1 : -1]) == "two"
    assert [tokenizer.vocabulary_piece(token_id) for token_id in middle.stop_ids] == ["▁<EOT>"]


def test_a_tokenizer_without_these_tokens_has_no_middle(checkpoints: Mapping[str, Path]) -> None:
    assert FillInMiddle.find(Tokenizer.from_folder(checkpoints["byte_level"])) is None
    assert FillInMiddle.find(_with(checkpoints["byte_level"], "<fim_prefix>", "<|fim_suffix|>")) is None
