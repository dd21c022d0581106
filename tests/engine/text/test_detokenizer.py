"""The streamed text equals the decoding of all ids at once, for any ids and any split."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from baton.engine.text.detokenizer import IncrementalDetokenizer
from baton.engine.text.tokenizer import Tokenizer

KINDS = ["byte_level", "byte_level_prefix", "llama", "metaspace"]
BYTE_TOKENS_FROM = 3  # in the sentencepiece layout: <unk>, <s>, </s>, then <0x00> to <0xFF>


@pytest.fixture(scope="module")
def tokenizers_by_kind(checkpoints: Mapping[str, Path]) -> Mapping[str, Tokenizer]:
    return {kind: Tokenizer.from_folder(folder) for kind, folder in checkpoints.items()}


def stream(detokenizer: IncrementalDetokenizer, ids: Sequence[int], cuts: Sequence[int]) -> str:
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    text = "".join(detokenizer.push(ids[start:end]) for start, end in pairwise(edges))
    return text + detokenizer.finish()


token_ids = st.lists(st.one_of(st.integers(0, 510), st.integers(0, 260)), max_size=40)
cuts = st.lists(st.integers(0, 1000), max_size=40)
texts = st.text(st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("ab ▁é€😀<s>")), max_size=30)


@pytest.mark.parametrize("kind", KINDS)
@given(ids=token_ids, cuts=cuts, skips=st.booleans())
def test_random_ids(
    tokenizers_by_kind: Mapping[str, Tokenizer], kind: str, ids: list[int], cuts: list[int], skips: bool
) -> None:
    tokenizer = tokenizers_by_kind[kind]
    streamed = stream(IncrementalDetokenizer(tokenizer, skip_special_tokens=skips), ids, cuts)
    assert streamed == tokenizer.decode(ids, skip_special_tokens=skips)


@pytest.mark.parametrize("kind", KINDS)
@given(text=texts, cuts=cuts)
def test_real_text(tokenizers_by_kind: Mapping[str, Tokenizer], kind: str, text: str, cuts: list[int]) -> None:
    tokenizer = tokenizers_by_kind[kind]
    ids = tokenizer.encode(text)
    assert stream(IncrementalDetokenizer(tokenizer), ids, cuts) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
@given(prompt=texts, ids=token_ids, cuts=cuts)
def test_continues_a_prompt(
    tokenizers_by_kind: Mapping[str, Tokenizer], kind: str, prompt: str, ids: list[int], cuts: list[int]
) -> None:
    tokenizer = tokenizers_by_kind[kind]
    prompt_ids = tokenizer.encode(f"{prompt} the")  # ends with a whole character, as a rendered prompt does
    streamed = stream(IncrementalDetokenizer(tokenizer, prompt_ids), ids, cuts)
    assert tokenizer.decode(prompt_ids) + streamed == tokenizer.decode(prompt_ids + ids)


@given(data=st.lists(st.integers(0, 255), max_size=12), cuts=cuts)
@pytest.mark.parametrize("kind", ["byte_level", "llama"])
def test_random_bytes(tokenizers_by_kind: Mapping[str, Tokenizer], kind: str, data: list[int], cuts: list[int]) -> None:
    tokenizer = tokenizers_by_kind[kind]
    by_bytes = {tokenizer.token_bytes(token_id): token_id for token_id in range(3, 300)}
    ids = [BYTE_TOKENS_FROM + byte if kind == "llama" else by_bytes[bytes([byte])] for byte in data]
    assert stream(IncrementalDetokenizer(tokenizer), ids, cuts) == tokenizer.decode(ids)


def test_an_unfinished_character_is_held_back(tokenizers_by_kind: Mapping[str, Tokenizer]) -> None:
    tokenizer = tokenizers_by_kind["byte_level"]
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.push([token_id]) for token_id in tokenizer.encode("a🦀")]
    assert "".join(pieces) == "a🦀"
    assert (pieces[0], pieces[-1]) == ("a", "🦀")
    detokenizer.push(tokenizer.encode("🦀")[:2])
    assert detokenizer.finish() == "\ufffd"


def test_a_run_of_byte_tokens_is_held_until_it_ends(tokenizers_by_kind: Mapping[str, Tokenizer]) -> None:
    tokenizer = tokenizers_by_kind["llama"]
    detokenizer = IncrementalDetokenizer(tokenizer)
    euro = [BYTE_TOKENS_FROM + byte for byte in "€".encode()]
    assert detokenizer.push(euro) == ""
    assert detokenizer.push(tokenizer.encode("the", add_special_tokens=False)) == "€ the"


@pytest.mark.parametrize("kind", ["byte_level", "llama"])
def test_a_character_begun_by_the_prompt_is_finished(tokenizers_by_kind: Mapping[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers_by_kind[kind]
    ids = tokenizer.encode("the 🦀🦀")
    detokenizer = IncrementalDetokenizer(tokenizer, ids[:-2])
    assert detokenizer.push(ids[-2:]) + detokenizer.finish() == "🦀"


@pytest.mark.parametrize("kind", ["byte_level", "llama"])
@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_a_character_that_the_prompt_leaves_unfinished_shows_nothing_of_it(
    tokenizers_by_kind: Mapping[str, Tokenizer], kind: str, num_bytes: int
) -> None:
    tokenizer = tokenizers_by_kind[kind]
    by_bytes = {tokenizer.token_bytes(token_id): token_id for token_id in range(3, 300)}
    in_bytes = [BYTE_TOKENS_FROM + byte if kind == "llama" else by_bytes[bytes([byte])] for byte in "🦀".encode()]
    prompt_ids = [*tokenizer.encode("the "), *in_bytes[:num_bytes]]
    the = tokenizer.encode(" the", add_special_tokens=False)
    for answer, text in (
        (the, tokenizer.decode([*tokenizer.encode("a"), *the])[1:]),
        ([], ""),
        (in_bytes, "🦀"),
        (in_bytes[num_bytes:], "🦀"),
        (in_bytes[:1], "\ufffd"),
    ):
        detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids)
        assert detokenizer.push(answer) + detokenizer.finish() == text


def test_the_prompts_own_text_is_not_returned(tokenizers_by_kind: Mapping[str, Tokenizer]) -> None:
    tokenizer = tokenizers_by_kind["llama"]
    detokenizer = IncrementalDetokenizer(tokenizer, tokenizer.encode("the 🦀"))
    assert detokenizer.push(tokenizer.encode("the", add_special_tokens=False)) == " the"


def test_only_the_first_text_loses_its_leading_space(tokenizers_by_kind: Mapping[str, Tokenizer]) -> None:
    tokenizer = tokenizers_by_kind["llama"]
    ids = tokenizer.encode("the", add_special_tokens=False)
    assert IncrementalDetokenizer(tokenizer, prompt_ids=[1]).push(ids) == "the"
    assert IncrementalDetokenizer(tokenizer, prompt_ids=[1, *ids]).push(ids) == " the"


@given(ids=st.lists(st.integers(0, 6), max_size=8), cuts=cuts)
@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.Strip("a", 1, 0),
        decoders.Sequence([decoders.Fuse(), decoders.Strip("a", 2, 0)]),
        decoders.Sequence([decoders.Replace("bc", "x"), decoders.Fuse()]),
        decoders.Metaspace(prepend_scheme="always"),
        decoders.Metaspace(prepend_scheme="never"),
    ],
)
def test_rarer_decoders(decoder: decoders.Decoder | None, ids: list[int], cuts: list[int]) -> None:
    vocabulary = ["a", "aa", "aba", "bcb", "▁", "▁a▁", "cc"]
    backend = Backend(models.WordLevel(vocab={piece: i for i, piece in enumerate(vocabulary)}, unk_token="a"))
    if decoder is not None:
        backend.decoder = decoder
    tokenizer = Tokenizer(backend)
    assert stream(IncrementalDetokenizer(tokenizer), ids, cuts) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["byte_level", "llama"])
def test_the_cost_of_a_token_does_not_grow_with_the_text(
    tokenizers_by_kind: Mapping[str, Tokenizer], kind: str
) -> None:
    detokenizer = IncrementalDetokenizer(tokenizers_by_kind[kind])
    ids = [BYTE_TOKENS_FROM + 0xE2] * 20_000  # the sentencepiece decoder can release nothing of it early

    def seconds() -> float:
        start = time.thread_time()
        for token_id in ids:
            detokenizer.push([token_id])
        return time.thread_time() - start

    first = seconds()
    seconds()
    assert seconds() < 5 * first + 0.1
