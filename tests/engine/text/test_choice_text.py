"""Text, entries and counts of one choice stay in step, however the tokens arrive."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import tokenizers
from tokenizers import decoders, models

from baton.engine.text.choice_text import EMPTY_DELTA, ChoiceText, TextDelta, TextOptions, join_deltas
from baton.engine.text.tokenizer import Tokenizer
from baton.wire.errors import InvalidMessage
from baton.wire.messages.output import TokenLogprobs

# byte-level pieces: Ġ is a space, â Ĥ ¬ are the three bytes of the euro sign
PIECES = ["Hello", "Ġworld", "Ġthe", "Ġend", "â", "Ĥ", "¬", "!", "ĠEN", "D", "xyz"]
HELLO, WORLD, THE, END, EURO_1, EURO_2, EURO_3, BANG, EN, D, XYZ, EOS = range(12)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(PIECES)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken("<eos>", special=True)])
    assert backend.token_to_id("<eos>") == EOS
    return Tokenizer(backend, eos_token_ids=frozenset({EOS}))


def _push_all(
    choice: ChoiceText, ids: Sequence[int], node_finish_reason: str = "length", step: int = 1
) -> list[TextDelta]:
    return [
        choice.push(ids[i : i + step], (), node_finish_reason if i + step >= len(ids) else "")
        for i in range(0, len(ids), step)
    ]


def _ids(delta: TextDelta) -> list[int]:
    return [entry.token_id for entry in delta.entries]


def test_each_token_comes_with_its_text(tokenizer: Tokenizer) -> None:
    choice = ChoiceText(tokenizer, TextOptions())
    deltas = _push_all(choice, [HELLO, WORLD, BANG])
    assert [(delta.text, _ids(delta)) for delta in deltas] == [("Hello", [HELLO]), (" world", [WORLD]), ("!", [BANG])]
    assert [delta.finish_reason for delta in deltas] == [None, None, "length"]
    assert [entry.text_offset for delta in deltas for entry in delta.entries] == [0, 5, 11]
    assert (choice.finish_reason, choice.num_completion_tokens) == ("length", 3)


def test_parts_of_a_character_wait_for_the_whole(tokenizer: Tokenizer) -> None:
    deltas = _push_all(ChoiceText(tokenizer, TextOptions()), [EURO_1, EURO_2, EURO_3, BANG])
    assert [(delta.text, _ids(delta)) for delta in deltas] == [
        ("", []), ("", []), ("€", [EURO_1, EURO_2, EURO_3]), ("!", [BANG])
    ]  # fmt: skip
    assert [delta.is_empty for delta in deltas] == [True, True, False, False]


def test_an_unfinished_character_ends_as_a_replacement(tokenizer: Tokenizer) -> None:
    whole = join_deltas(_push_all(ChoiceText(tokenizer, TextOptions()), [HELLO, EURO_1]))
    assert (whole.text, _ids(whole)) == ("Hello\ufffd", [HELLO, EURO_1])


def test_eos_is_reported_and_counted_but_silent(tokenizer: Tokenizer) -> None:
    for skip_special_tokens in (True, False):
        choice = ChoiceText(tokenizer, TextOptions(skip_special_tokens=skip_special_tokens))
        whole = join_deltas(_push_all(choice, [HELLO, EOS], "stop"))
        assert (whole.text, _ids(whole), whole.finish_reason) == ("Hello", [HELLO, EOS], "stop")
        assert (whole.entries[1].text_offset, choice.num_completion_tokens) == (5, 2)


def test_a_stop_token_is_silent_unless_it_is_to_be_included(tokenizer: Tokenizer) -> None:
    silent = join_deltas(_push_all(ChoiceText(tokenizer, TextOptions()), [HELLO, WORLD], "stop"))
    included = join_deltas(_push_all(ChoiceText(tokenizer, TextOptions(include_stop=True)), [HELLO, WORLD], "stop"))
    assert (silent.text, included.text) == ("Hello", "Hello world")


@pytest.mark.parametrize(("skip", "text"), [(True, "Hello world"), (False, "Hello<eos> world")])
def test_special_tokens_within_the_text(tokenizer: Tokenizer, skip: bool, text: str) -> None:
    whole = join_deltas(_push_all(ChoiceText(tokenizer, TextOptions(skip_special_tokens=skip)), [HELLO, EOS, WORLD]))
    assert (whole.text, _ids(whole)) == (text, [HELLO, EOS, WORLD])


def test_a_stop_string_ends_the_choice_before_the_node_does(tokenizer: Tokenizer) -> None:
    choice = ChoiceText(tokenizer, TextOptions(stop=(" END",)))
    deltas = _push_all(choice, [HELLO, EN, D, XYZ])
    assert [delta.text for delta in deltas] == ["Hello", "", "", ""]
    assert [_ids(delta) for delta in deltas] == [[HELLO], [], [], []]
    assert (deltas[2].finish_reason, choice.finish_reason) == ("stop", "stop")
    assert deltas[3] is EMPTY_DELTA
    assert choice.num_completion_tokens == 3


def test_held_text_and_its_tokens_come_when_the_stop_string_fails(tokenizer: Tokenizer) -> None:
    deltas = _push_all(ChoiceText(tokenizer, TextOptions(stop=(" END",))), [HELLO, EN, BANG])
    assert [(delta.text, _ids(delta)) for delta in deltas] == [("Hello", [HELLO]), ("", []), (" EN!", [EN, BANG])]


def test_held_text_comes_at_the_end(tokenizer: Tokenizer) -> None:
    deltas = _push_all(ChoiceText(tokenizer, TextOptions(stop=(" END",))), [HELLO, EN])
    assert [(delta.text, _ids(delta)) for delta in deltas] == [("Hello", [HELLO]), (" EN", [EN])]


def test_a_token_cut_in_its_middle_is_reported_once(tokenizer: Tokenizer) -> None:
    choice = ChoiceText(tokenizer, TextOptions(stop=("ld!",)))
    whole = join_deltas(_push_all(choice, [HELLO, WORLD, BANG]))
    assert (whole.text, _ids(whole), whole.finish_reason) == ("Hello wor", [HELLO, WORLD], "stop")


def test_tokens_after_the_stop_string_in_one_event_are_dropped(tokenizer: Tokenizer) -> None:
    choice = ChoiceText(tokenizer, TextOptions(stop=("!",)))
    delta = choice.push([HELLO, BANG, WORLD, XYZ])
    assert (delta.text, _ids(delta), delta.finish_reason) == ("Hello", [HELLO], "stop")
    assert choice.num_completion_tokens == 2


def test_the_stop_string_can_be_included(tokenizer: Tokenizer) -> None:
    choice = ChoiceText(tokenizer, TextOptions(stop=(" END",), include_stop=True))
    whole = join_deltas(_push_all(choice, [HELLO, EN, D, XYZ]))
    assert (whole.text, _ids(whole)) == ("Hello END", [HELLO, EN, D])


def test_a_stop_string_before_min_tokens_does_not_count(tokenizer: Tokenizer) -> None:
    choice = ChoiceText(tokenizer, TextOptions(stop=("!",), min_tokens=2))
    whole = join_deltas(_push_all(choice, [HELLO, BANG, WORLD, BANG, XYZ]))
    assert (whole.text, whole.finish_reason) == ("Hello! world", "stop")


def test_a_stop_string_that_the_last_token_completes_wins_over_the_length(tokenizer: Tokenizer) -> None:
    whole = join_deltas(_push_all(ChoiceText(tokenizer, TextOptions(stop=("!",))), [HELLO, BANG]))
    assert (whole.text, whole.finish_reason) == ("Hello", "stop")


def test_log_probabilities_carry_text_and_bytes(tokenizer: Tokenizer) -> None:
    choice = ChoiceText(tokenizer, TextOptions())
    logprobs = [TokenLogprobs(-1.0, (EURO_1, BANG), (-1.0, -2.0)), TokenLogprobs(-0.5, (), ())]
    assert choice.push([EURO_1], logprobs[:1]).is_empty
    delta = choice.push([BANG], logprobs[1:], "length")
    assert delta.text == "\ufffd!"
    first, second = delta.entries
    assert first.chosen is not None
    assert (first.chosen.data, first.chosen.text, first.chosen.logprob) == (b"\xe2", "\ufffd", -1.0)
    assert [(token.text, token.logprob) for token in first.top] == [("\ufffd", -1.0), ("!", -2.0)]
    assert second.chosen is not None
    assert (second.chosen.data, second.top) == (b"!", ())


def test_tokens_can_be_written_as_ids(tokenizer: Tokenizer) -> None:
    choice = ChoiceText(tokenizer, TextOptions(tokens_as_ids=True))
    (entry,) = choice.push([BANG], [TokenLogprobs(-1.0, (HELLO,), (-1.0,))], "length").entries
    assert entry.chosen is not None
    assert (entry.chosen.text, entry.chosen.data, entry.top[0].text) == (f"token_id:{BANG}", b"!", f"token_id:{HELLO}")


def test_tokens_come_without_text_when_it_is_not_wanted(tokenizer: Tokenizer) -> None:
    choice = ChoiceText(tokenizer, TextOptions(detokenize=False))
    deltas = _push_all(choice, [EURO_1, HELLO, EOS], "stop")
    assert [(delta.text, _ids(delta)) for delta in deltas] == [("", [EURO_1]), ("", [HELLO]), ("", [EOS])]
    assert (choice.num_completion_tokens, choice.finish_reason) == (3, "stop")
    assert choice.push([HELLO]) is EMPTY_DELTA


def test_log_probabilities_that_do_not_match_the_tokens_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidMessage):
        ChoiceText(tokenizer, TextOptions()).push([HELLO, WORLD], [TokenLogprobs(-1.0, (), ())])


def test_the_prompt_decides_about_an_unfinished_character(tokenizer: Tokenizer) -> None:
    choice = ChoiceText(tokenizer, TextOptions(), prompt_ids=[HELLO, EURO_1, EURO_2])
    assert choice.push([EURO_3], (), "length").text == "€"


@pytest.mark.parametrize("seed", range(20))
def test_how_the_tokens_arrive_changes_nothing(tokenizer: Tokenizer, seed: int) -> None:
    rng = random.Random(seed)
    ids = rng.choices(range(len(PIECES) + 1), k=30)
    options = TextOptions(stop=("xyzHello", "!D", " END!"), include_stop=rng.random() < 0.5)
    one_by_one = ChoiceText(tokenizer, options)
    whole = join_deltas(_push_all(one_by_one, ids))
    for step in (2, 7, 30):
        choice = ChoiceText(tokenizer, options)
        assert join_deltas(_push_all(choice, ids, step=step)) == whole
        assert choice.num_completion_tokens == one_by_one.num_completion_tokens
    assert _ids(whole) == ids[: len(whole.entries)]
