"""Text in every script comes out as it is, however its tokens are split, and is cut exactly at a stop string."""
# ruff: noqa: RUF001

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from baton.engine.text.choice_text import ChoiceText, TextOptions
from baton.engine.text.tokenizer import Tokenizer
from baton.wire.messages.output import FINISH_LENGTH

SAMPLES = {
    "English": "It's 5 o'clock -- isn't it?",
    "German": "Größe, Übermut, Straße",
    "French": "« Où êtes-vous ? » – naïve",
    "Vietnamese": "Tiếng Việt rất khó",
    "Turkish": "İstanbul'da ığdır",
    "Polish": "Zażółć gęślą jaźń",
    "Greek": "Καλημέρα κόσμε",
    "Russian": "Съешь ещё этих булок",
    "Armenian": "Բարեւ աշխարհ",
    "Georgian": "გამარჯობა მსოფლიო",
    "Hebrew": "שָׁלוֹם עוֹלָם",
    "Arabic": "مرحبا بالعالم ١٢٣",
    "Persian": "می‌خواهم بروم",
    "Hindi": "नमस्ते दुनिया क्षि",
    "Bengali": "ওহে বিশ্ব",
    "Tamil": "வணக்கம் உலகம்",
    "Thai": "สวัสดีชาวโลก",
    "Burmese": "မင်္ဂလာပါ",
    "Khmer": "សួស្តី​ពិភពលោក",
    "Amharic": "ሰላም ልዑል",
    "Chinese": "你好，世界。今天天气很好",
    "Japanese": "こんにちは、世界！ｶﾅ",
    "Korean": "안녕하세요 세계",
    "decomposed": "e\u0301a\u0308 n\u0303 각",
    "emoji": "👩‍👩‍👧 🇨🇭 👍🏽 ❤️ 🦀",
    "rare planes": "𝔘𝔫𝔦 𐍈 𠜎 𝄞",
    "code": "def f(x):\n\treturn {'a': x}  # ok\r\n",
    "spaces": "a  b   c\u00a0d\u2003e\u3000f",
    "controls": "a\x00b\x1bc\u2028d\u0085e\ufeff\ufffdf",
}


@pytest.fixture(scope="module", params=["byte_level", "llama"])
def tokenizer(checkpoints: Mapping[str, Path], request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer.from_folder(checkpoints[request.param])


def _streamed(tokenizer: Tokenizer, options: TextOptions, ids: Sequence[int], edges: Sequence[int]) -> tuple[str, str]:
    """The text and the finish reason of a choice whose tokens come in the pieces between `edges`."""
    choice = ChoiceText(tokenizer, options)
    text = ""
    for begin, end in pairwise((0, *edges, len(ids))):
        text += choice.push(ids[begin:end], (), FINISH_LENGTH if end == len(ids) else "").text
    return text, choice.finish_reason or ""


def test_every_split_gives_the_same_text(tokenizer: Tokenizer) -> None:
    for sample in SAMPLES.values():
        ids = tokenizer.encode(sample, add_special_tokens=False)
        assert tokenizer.decode(ids) == sample
        inner = range(1, len(ids))
        splits = [[], *([edge] for edge in inner), *([*range(step, len(ids), step)] for step in (1, 2, 3, 5))]
        assert {_streamed(tokenizer, TextOptions(), ids, edges) for edges in splits} == {(sample, FINISH_LENGTH)}


@pytest.mark.parametrize("length", [1, 3])
def test_every_part_of_a_text_cuts_it_exactly(tokenizer: Tokenizer, length: int) -> None:
    for sample in SAMPLES.values():
        ids = tokenizer.encode(sample, add_special_tokens=False)
        for begin in range(0, len(sample) - length + 1, 2):
            stop = sample[begin : begin + length]
            expected = sample[: sample.index(stop)]
            for step in (1, 4):
                edges = range(step, len(ids), step)
                assert _streamed(tokenizer, TextOptions((stop,)), ids, edges) == (expected, "stop")
                with_stop = _streamed(tokenizer, TextOptions((stop,), include_stop=True), ids, edges)
                assert with_stop == (expected + stop, "stop")
