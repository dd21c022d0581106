"""Prompts for a text in the middle: what comes before it, what comes after it, in the form its model was trained on.

Owns the families and the order of their tokens (prefix, suffix, middle). A family is known by the added tokens of the
tokenizer; a tokenizer without any such set cannot be asked for a middle. Each part is encoded by itself, so the text of
one never merges with that of another.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.engine.text.tokenizer import Tokenizer

_MARK = "☺"
"""A character before the suffix, which takes the space that CodeLlama's vocabulary adds at the beginning of a text."""


@dataclass(frozen=True, slots=True)
class _Family:
    """`begin`, `hole` and `end` stand before the prefix, before the suffix, and before the text that is asked for.
    `stop` ends that text where the model has a token of its own for it. `has_space`: the vocabulary puts a space before
    a text, which the suffix of this family does without."""

    begin: str
    hole: str
    end: str
    stop: str = ""
    has_space: bool = False


_FAMILIES = (
    _Family("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    _Family("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, StarCoder2
    _Family("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    _Family("<\uff5cfim▁begin\uff5c>", "<\uff5cfim▁hole\uff5c>", "<\uff5cfim▁end\uff5c>"),  # DeepSeek-Coder
    _Family("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>", has_space=True),  # CodeLlama
)


@dataclass(frozen=True, slots=True)
class FillInMiddle:
    """The tokens of one tokenizer's family. `stop_ids` end the text in the middle, beside the usual end."""

    begin_id: int
    hole_id: int
    end_id: int
    stop_ids: tuple[int, ...]
    has_space: bool

    @classmethod
    def find(cls, tokenizer: Tokenizer) -> FillInMiddle | None:
        """The family of `tokenizer`, None when it has none."""
        for family in _FAMILIES:
            ids = [tokenizer.added_token_id(name) for name in (family.begin, family.hole, family.end)]
            begin_id, hole_id, end_id = ids
            if begin_id is not None and hole_id is not None and end_id is not None:
                stop_id = tokenizer.added_token_id(family.stop)
                return cls(begin_id, hole_id, end_id, () if stop_id is None else (stop_id,), family.has_space)
        return None

    def prompt(self, tokenizer: Tokenizer, prefix: str, suffix: str) -> list[int]:
        """Token ids after which the model writes what stands between `prefix` and `suffix`."""
        before = tokenizer.encode(prefix, add_special_tokens=False)
        after = _without_space(tokenizer, suffix) if self.has_space else tokenizer.encode(suffix, False)
        return [*_opening(tokenizer), self.begin_id, *before, self.hole_id, *after, self.end_id]


def _opening(tokenizer: Tokenizer) -> list[int]:
    """The token that begins a text, where the tokenizer puts one."""
    bos_id = tokenizer.bos_token_id
    return [bos_id] if bos_id is not None and tokenizer.encode("")[:1] == [bos_id] else []


def _without_space(tokenizer: Tokenizer, text: str) -> list[int]:
    num_of_mark = len(tokenizer.encode(_MARK, add_special_tokens=False))
    return tokenizer.encode(_MARK + text, add_special_tokens=False)[num_of_mark:]
