"""Whatever tokens the masks of a grammar are left to, the text obeys the grammar, and its end is noticed at once."""

from __future__ import annotations

import random
import threading
from concurrent.futures import Future
from unittest import mock

import numpy as np
import pytest

from baton.engine.structured.matcher import (
    MAX_COMPILED,
    OUT_OF_RESOURCES,
    WORN_OUT,
    CompiledGrammar,
    FirstMatcher,
    GrammarMatcher,
    Grammars,
)
from baton.engine.structured.vocabulary import Vocabulary
from baton.engine.text.tokenizer import Tokenizer
from baton.wire.errors import InvalidRequest, ModelLoadError
from baton.wire.grammar import Grammar
from tests.engine.structured.answers import GRAMMARS, PERSON

MAX_TOKENS = 150


def _compiled(vocabulary: Vocabulary, grammar: Grammar) -> CompiledGrammar:
    first: Future[FirstMatcher] = Future()
    first.set_result(FirstMatcher(vocabulary.compile(grammar), vocabulary.tokens.vocab_size))
    return CompiledGrammar(first)


def matcher_of(vocabulary: Vocabulary, grammar: Grammar, output: tuple[int, ...] = ()) -> GrammarMatcher:
    return GrammarMatcher(_compiled(vocabulary, grammar), output)


def allowed_by(matcher: GrammarMatcher) -> list[int]:
    mask = matcher.mask()
    assert mask is not None, matcher.error
    return np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist()


def _walk(matcher: GrammarMatcher, tokenizer: Tokenizer, chance: random.Random) -> list[int]:
    """Tokens drawn uniformly from what is allowed, up to an end."""
    output: list[int] = []
    while len(output) < MAX_TOKENS:
        token_id = chance.choice(allowed_by(matcher))
        matcher.take(token_id)
        if token_id in tokenizer.eos_token_ids:
            assert matcher.is_complete
            return output
        output.append(token_id)
        if matcher.is_complete:
            return output
    return []


@pytest.mark.parametrize("name", GRAMMARS)
def test_random_tokens_under_a_mask_obey_the_grammar(name: str, vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    grammar, obeys = GRAMMARS[name]
    first, chance, texts = matcher_of(vocabulary, grammar), random.Random(7), set()
    for _ in range(30):
        output = _walk(first.fork(()), tokenizer, chance)
        if output:
            text = tokenizer.decode(output)
            assert obeys(text), text
            texts.add(text)
    assert len(texts) > 1


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_matcher_that_begins_behind_some_tokens_allows_the_same(
    name: str, vocabulary: Vocabulary, tokenizer: Tokenizer
) -> None:
    first = matcher_of(vocabulary, GRAMMARS[name][0])
    walked = first.fork(())
    output: list[int] = []
    for _ in range(12):
        begun_here = first.fork(output)
        allowed = allowed_by(walked)
        assert allowed_by(begun_here) == allowed
        output.append(allowed[len(output) % len(allowed)])
        walked.take(output[-1])
        if walked.is_complete:
            break


@pytest.mark.parametrize("name", GRAMMARS)
def test_what_is_accepted_is_what_a_mask_allows(name: str, vocabulary: Vocabulary) -> None:
    matcher, beyond = matcher_of(vocabulary, GRAMMARS[name][0]), vocabulary.tokens.vocab_size
    allowed = set(allowed_by(matcher))
    matcher = matcher.fork(())  # one that was not asked for a mask
    for token_id in range(beyond + 40):  # a model may have more tokens than its tokenizer
        assert matcher.accepts(token_id) == (token_id in allowed)
    assert set(allowed_by(matcher)) == allowed


@pytest.mark.parametrize("name", GRAMMARS)
def test_asking_changes_nothing(name: str, vocabulary: Vocabulary) -> None:
    asked, chance = matcher_of(vocabulary, GRAMMARS[name][0]), random.Random(3)
    for _ in range(5):
        asked, unasked = asked.fork(()), asked.fork(())
        for _ in range(40):
            forced, allowed = asked.forced_token(), allowed_by(unasked)
            assert allowed_by(asked) == allowed
            assert forced is None or allowed == [forced]
            asked.accepts(chance.choice(allowed))  # not taken, unless it is the same token
            token_id = chance.choice(allowed)
            asked.take(token_id)
            unasked.take(token_id)
            assert (asked.is_complete, asked.leaves_choice) == (unasked.is_complete, unasked.leaves_choice)
            if unasked.is_complete:
                break


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_token_is_accepted_where_its_mask_has_it(name: str, vocabulary: Vocabulary) -> None:
    matcher, chance = matcher_of(vocabulary, GRAMMARS[name][0]), random.Random(3)
    for _ in range(12):
        allowed = allowed_by(matcher)
        accepted = [token_id for token_id in range(8 * vocabulary.num_mask_bytes) if matcher.accepts(token_id)]
        assert accepted == allowed
        matcher.accepts(allowed[0])  # not taken: another choice has drawn it
        token_id = chance.choice(allowed)
        assert matcher.accepts(token_id)
        matcher.take(token_id)
        if matcher.is_complete:
            break


def test_an_end_is_allowed_only_where_the_grammar_allows_one(vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    ends = set(tokenizer.eos_token_ids)
    matcher = matcher_of(vocabulary, Grammar.regex("[0-9]{2,4}"))
    for number, can_end in enumerate([False, False, True, True]):
        allowed = set(allowed_by(matcher))
        assert (ends <= allowed, bool(ends & allowed)) == (can_end, can_end), number
        matcher.take(tokenizer.encode("7", add_special_tokens=False)[0])
    assert matcher.is_complete
    assert set(allowed_by(matcher)) == ends


def test_a_special_token_is_no_text(vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    matcher = matcher_of(vocabulary, Grammar.regex("(.|\n)*"))
    allowed = allowed_by(matcher)
    assert tokenizer.added_token_id("<|im_start|>") not in allowed
    assert len(allowed) > 100


def test_a_token_that_does_not_fit_ends_the_matcher_with_a_reason(vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    matcher = matcher_of(vocabulary, Grammar.regex("[0-9]+"), tuple(tokenizer.encode("x", add_special_tokens=False)))
    assert matcher.mask() is None
    assert matcher.error
    assert not matcher.is_complete


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar.json_schema({"type": "foo"}), "foo"),
        (Grammar.json_schema({"type": "string", "enum": []}), "nothing obeys it"),
        (Grammar.json_schema({"not": {"type": "string"}}), "not"),
        (Grammar.regex("("), "unclosed group"),
        (Grammar.regex(r"(a)\1"), "backreferences are not supported"),
        (Grammar.ebnf("start: missing"), "missing"),
        (Grammar.ebnf('root ::= "a'), ""),
        (Grammar.json_schema({"$ref": "#"}), ""),
        (Grammar.json_schema({"type": "object", "properties": {"x" * 9000: {}}}), "9000 characters"),
        (Grammar.choice(["a", "x" * 9000]), "9000 characters"),
    ],
    ids=str,
)
def test_what_cannot_be_compiled_has_a_reason(grammar: Grammar, reason: str, vocabulary: Vocabulary) -> None:
    with pytest.raises(InvalidRequest) as caught:
        vocabulary.compile(grammar)
    assert reason in caught.value.message
    assert caught.value.message.isprintable()
    assert 0 < len(caught.value.message) <= 300


def test_the_options_of_the_compiler_are_not_the_client_s(vocabulary: Vocabulary) -> None:
    with pytest.raises(InvalidRequest, match="not"):
        vocabulary.compile(Grammar.json_schema({"not": {}, "x-guidance": {"lenient": True}}))


def test_white_space_has_an_end(vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    matcher = matcher_of(
        vocabulary, Grammar.json_schema(PERSON), tuple(tokenizer.encode("{", add_special_tokens=False))
    )
    for _ in range(60):
        blank = [token_id for token_id in allowed_by(matcher) if not tokenizer.token_text(token_id).strip(" \n\t\r")]
        if not blank:
            return
        matcher.take(blank[0])
    pytest.fail("white space goes on for ever")


def test_a_grammar_is_compiled_once_and_the_oldest_is_forgotten(vocabulary: Vocabulary) -> None:
    grammars = Grammars(lambda: vocabulary)
    first = grammars.prepare(Grammar.regex("a"))
    assert grammars.prepare(Grammar.regex("a")) is first
    for number in range(MAX_COMPILED):
        grammars.prepare(Grammar.regex(f"b{number}"))
    assert grammars.prepare(Grammar.regex("a")) is not first


def test_a_matcher_is_ready_when_its_grammar_was_compiled(vocabulary: Vocabulary) -> None:
    may_load = threading.Event()

    def load() -> Vocabulary:
        assert may_load.wait(30)
        return vocabulary

    grammars = Grammars(load)
    matcher = grammars.matcher(Grammar.regex("ab"), ())
    assert not matcher.is_ready
    may_load.set()
    assert matcher.mask() is not None
    assert matcher.is_ready


def test_a_vocabulary_that_was_loaded_early_is_not_loaded_again(vocabulary: Vocabulary) -> None:
    loads: list[Vocabulary] = []

    def load() -> Vocabulary:
        loads.append(vocabulary)
        return vocabulary

    grammars = Grammars(load)
    grammars.begin_loading()
    grammars.finish_loading()
    assert grammars.matcher(Grammar.regex("a"), ()).mask() is not None
    assert len(loads) == 1


def test_a_checkpoint_without_a_usable_tokenizer_fails_the_matcher() -> None:
    def load() -> Vocabulary:
        raise ModelLoadError("no tokenizer here")

    grammars = Grammars(load)
    grammars.begin_loading()
    grammars.finish_loading()
    matcher = grammars.matcher(Grammar.regex("a"), ())
    assert matcher.mask() is None
    assert matcher.error == "no tokenizer here"


@pytest.mark.parametrize("text", ["", "x" * (2**17 + 1)])
def test_a_grammar_has_a_text_of_bounded_length(text: str) -> None:
    with pytest.raises(InvalidRequest):
        Grammar("regex", text)
    with pytest.raises(InvalidRequest):
        Grammar("yaml", "a")


def test_what_a_node_could_not_compile_for_want_of_memory_it_compiles_when_it_is_asked_again(
    vocabulary: Vocabulary,
) -> None:
    lacking: list[Exception] = [OSError(24, "Too many open files"), MemoryError()]

    def load() -> Vocabulary:
        if lacking:
            raise lacking.pop()
        return vocabulary

    grammars = Grammars(load)
    for _ in range(2):
        matcher = grammars.matcher(Grammar.regex("a"), ())
        assert matcher.mask() is None
        assert matcher.error == OUT_OF_RESOURCES
    assert grammars.matcher(Grammar.regex("a"), ()).mask() is not None


def test_without_a_thread_to_compile_it_a_grammar_fails_until_it_is_asked_for_again(vocabulary: Vocabulary) -> None:
    grammars = Grammars(lambda: vocabulary)
    with mock.patch("threading._start_new_thread", side_effect=RuntimeError("can't start new thread")):
        matcher = grammars.matcher(Grammar.regex("a"), ())
        assert matcher.mask() is None
        assert matcher.error == OUT_OF_RESOURCES
    assert grammars.matcher(Grammar.regex("a"), ()).mask() is not None


def test_states_that_other_answers_have_reached_end_no_grammar(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.engine.structured.vocabulary.MAX_LEXER_STATES", 150)
    grammars = Grammars(lambda: vocabulary)

    def error_of(grammar: Grammar, text: str) -> str:
        matcher = grammars.matcher(grammar, ())
        for token_id in vocabulary.tokens.tokenize_str(text):
            if matcher.mask() is None:
                break
            matcher.take(token_id)
        return matcher.error

    both, first, second = Grammar.regex("a{99}|b{99}"), "a" * 99, "b" * 99
    assert error_of(both, first) == ""
    assert error_of(both, second) == WORN_OUT
    assert error_of(both, second) == ""  # compiled anew
    assert "too many states" in error_of(Grammar.regex("[ab]{300}"), "a" * 300)  # its own
