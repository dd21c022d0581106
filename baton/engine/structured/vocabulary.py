"""A vocabulary as llguidance sees it, and grammars compiled over it.

Owns every call that builds something in llguidance: the forms in which grammars reach it, and the limits of what one
grammar may take. Does not know requests, threads or nodes. A compiled grammar is a matcher in its first state, of which
requests have copies.

Limits: one mask takes at most some 15 ms, because llguidance counts its work and gives up. Compiling has no such bound,
so a router compiles in a process of its own first (`baton.engine.structured.compile_process`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.engine.structured.dates import with_real_dates
from baton.engine.structured.followable import unfollowable
from baton.engine.structured.schema_faults import explained, in_plain_words
from baton.engine.text.tokenizer import Tokenizer
from baton.wire.errors import InvalidRequest, ModelLoadError
from baton.wire.grammar import CHOICE, EBNF, JSON_SCHEMA, LARK, REGEX, Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

LARGE_BYTES = 2**20
"""Of a tokenizer's file. A larger one is loaded before a node serves: loading it later would hold up everything."""
MAX_LEXER_STATES = 50_000
"""Some 2 kB each, for all requests whose matchers are copies of one: see `CompiledGrammar`."""
MAX_TEXT_CHARS = 8192
"""Of a name or a constant: while it is written, each mask looks at all that is left, a millisecond for so much."""
_MAX_REASON = 300
_POSITION = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of one checkpoint. `num_mask_bytes`: a mask has a bit for each token id, the lowest first."""

    tokens: LLTokenizer
    num_mask_bytes: int

    @classmethod
    def from_folder(cls, folder: Path, eos_token_ids: Collection[int]) -> Vocabulary:
        """Load the tokenizer of the checkpoint in `folder`; `eos_token_ids` are the tokens that may end an output.

        Raises `ModelLoadError` when there is none that llguidance understands.
        """
        from llguidance import LLTokenizer  # slow to import, and most processes never need it

        definition = Tokenizer.from_folder(folder).definition()
        try:
            tokens = LLTokenizer(definition, eos_token=sorted(eos_token_ids) or None)
        except Exception as error:  # the library has no errors of its own
            raise ModelLoadError(f"the tokenizer does not support structured output: {_reason(str(error))}") from None
        return cls(tokens, -(-tokens.vocab_size // 32) * 4)

    def compile(self, grammar: Grammar) -> LLMatcher:
        """The matcher of `grammar` before any token. Raises `InvalidRequest` with the reason when there is none; its
        `param` is the place in a schema, see `schema_faults`."""
        matcher = self._matcher(_library_form(grammar))
        reason = _reason_against(matcher)
        if reason and grammar.kind == JSON_SCHEMA:
            fault = explained(json.loads(grammar.text), reason, self._reason_against_schema)
            raise InvalidRequest(_reason(fault.reason), fault.place)
        if reason:
            raise InvalidRequest(_reason(in_plain_words(reason)), "")
        return matcher

    def _matcher(self, form: str) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        return LLMatcher(self.tokens, form, log_level=0, limits=limits)

    def _reason_against_schema(self, schema: Mapping[str, Any]) -> str:
        return _reason_against(self._matcher(_schema_form(schema)))


def _reason_against(matcher: LLMatcher) -> str:
    """Why a grammar cannot be used, "" when it can. The first mask finds what compiling does not: a grammar that no
    text obeys, and one that is too much work."""
    if not matcher.is_error() and not any(matcher.compute_bitmask()):
        return "no text obeys the grammar"
    return matcher.get_error() if matcher.is_error() else ""


def is_large(folder: Path) -> bool:
    """Whether the tokenizer of a checkpoint takes long to load."""
    file = folder / "tokenizer.json"
    return file.is_file() and file.stat().st_size > LARGE_BYTES


def require_sound(matcher: LLMatcher) -> None:
    """Raise `InvalidRequest` when `matcher` has given up."""
    if matcher.is_error():
        raise InvalidRequest(_reason(in_plain_words(matcher.get_error())), "grammar")


def _library_form(grammar: Grammar) -> str:
    """The grammar in llguidance's own format. Raises `InvalidRequest`."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    if grammar.kind == JSON_SCHEMA:
        schema = json.loads(grammar.text)
        _require_short_texts(schema)
        _require_followable(schema)
        return _schema_form(schema)
    if grammar.kind == REGEX:
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == CHOICE:
        texts = json.loads(grammar.text)
        _require_short_texts(texts)
        choices = " | ".join(map(json.dumps, texts))
        return LLMatcher.grammar_from_lark(f"start: {choices}")
    if grammar.kind == LARK:
        return LLMatcher.grammar_from_lark(grammar.text)
    assert grammar.kind == EBNF
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(grammar.text))
    except Exception as error:  # its parser fails in several ways
        raise InvalidRequest(_reason(str(error)) or "it cannot be read") from None


def require_followable(grammar: Grammar) -> None:
    """Raise `InvalidRequest` for a schema that compiles and yet has no answer; its `param` is the place."""
    if grammar.kind == JSON_SCHEMA:
        _require_followable(json.loads(grammar.text))


def _require_followable(schema: Any) -> None:
    fault = unfollowable(schema)
    if fault is not None:
        raise InvalidRequest(fault.reason, fault.place)


def _schema_form(schema: Any) -> str:
    return json.dumps({"grammars": [{"json_schema": with_real_dates(schema)}]})


def _require_short_texts(value: Any) -> None:
    """Raise `InvalidRequest` for a text in a schema or a choice that is too long."""
    if isinstance(value, str) and len(value) > MAX_TEXT_CHARS:
        raise InvalidRequest(f"a text in it has {len(value)} characters, at most {MAX_TEXT_CHARS} can be")
    if isinstance(value, dict):
        _require_short_texts(list(value))
        value = list(value.values())
    for each in value if isinstance(value, list) else ():
        _require_short_texts(each)


def _reason(text: str) -> str:
    """The first line of what the library says, which quotes the client's text: printable and short."""
    line = _POSITION.sub(r"line \1, column \2: ", text.strip().partition("\n")[0])
    printable = "".join(char if char.isprintable() else " " for char in line)
    return printable if len(printable) <= _MAX_REASON else f"{printable[: _MAX_REASON - 3]}..."
