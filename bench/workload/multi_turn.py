"""Dataset `multi_turn`: conversations in which each prompt holds all that was said before it.

All begin with the same system prompt. The number of turns, the lengths of what the user says and of the answers are
uniform around the ones asked for. What the model answers is not known here: the client puts it in between.
"""

from __future__ import annotations

import numpy as np

from bench.workload.dataset_settings import DatasetSettings, check_count, check_ratio
from bench.workload.passages import Passage, draw_ids, first_turn, fitted, lengths_around
from bench.workload.seeds import generator
from bench.workload.turns import Conversation, Turn
from bench.workload.vocabulary import Vocabulary
from bench.workload.workload import Workload, described


def make(settings: DatasetSettings, vocabulary: Vocabulary) -> Workload:
    """`num_prompts` conversations. Raises `InvalidSetting`."""
    ratio = settings.multi_turn_range_ratio
    check_count(settings.multi_turn_num_turns, "--multi-turn-num-turns", 1)
    check_count(settings.multi_turn_system_len, "--multi-turn-system-len", 0)
    check_count(settings.multi_turn_user_len, "--multi-turn-user-len", 1)
    check_count(settings.multi_turn_output_len, "--multi-turn-output-len", 1)
    check_ratio(ratio, "--multi-turn-range-ratio")
    random = generator(settings.seed, "prompts")
    num_system = max(settings.multi_turn_system_len - len(vocabulary.opening_ids), 0)
    system = fitted(vocabulary, draw_ids(vocabulary, num_system, random), random)
    passages: list[Passage] = []
    conversations = []
    for num_turns in lengths_around(settings.multi_turn_num_turns, ratio, settings.num_prompts, 1, random):
        said = _said(settings, vocabulary, system, num_turns, random)
        output_lens = lengths_around(settings.multi_turn_output_len, ratio, num_turns, 1, random)
        first = first_turn(vocabulary, said[0], output_lens[0])
        later = [
            Turn(passage.token_ids, passage.text, output_len)
            for passage, output_len in zip(said[1:], output_lens[1:], strict=True)
        ]
        passages += said
        conversations.append(Conversation((first, *later)))
    facts = {"system_tokens": settings.multi_turn_system_len, "range_ratio": ratio}
    return described(settings, conversations, passages, facts)


def _said(
    settings: DatasetSettings, vocabulary: Vocabulary, system: Passage, num_turns: int, random: np.random.Generator
) -> list[Passage]:
    """What each turn adds: the first one the system prompt, too."""
    lengths = lengths_around(settings.multi_turn_user_len, settings.multi_turn_range_ratio, num_turns, 1, random)
    drawn = [draw_ids(vocabulary, length, random) for length in lengths]
    drawn[0] = system.token_ids + drawn[0]
    return [fitted(vocabulary, token_ids, random) for token_ids in drawn]
