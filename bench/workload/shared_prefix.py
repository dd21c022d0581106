"""Dataset `prefix_repetition`: groups of prompts that begin with the same tokens, in random order.

Every prompt has prefix_len + suffix_len tokens; what a server adds to a text counts as part of the prefix. Groups
differ by at most one request, so that all `--num-prompts` are made.
"""

from __future__ import annotations

from bench.workload.dataset_settings import DatasetSettings, check_count
from bench.workload.passages import draw_ids, first_turn, fitted, num_after_opening
from bench.workload.seeds import generator
from bench.workload.turns import Conversation
from bench.workload.vocabulary import Vocabulary
from bench.workload.workload import Workload, described
from wire.errors import InvalidSetting


def make(settings: DatasetSettings, vocabulary: Vocabulary) -> Workload:
    """`num_prompts` conversations of one turn. Raises `InvalidSetting`."""
    prefix_len, suffix_len = settings.prefix_repetition_prefix_len, settings.prefix_repetition_suffix_len
    num_prefixes, output_len = settings.prefix_repetition_num_prefixes, settings.prefix_repetition_output_len
    check_count(prefix_len, "--prefix-repetition-prefix-len", 0)
    check_count(suffix_len, "--prefix-repetition-suffix-len", 0)
    check_count(prefix_len + suffix_len, "--prefix-repetition-prefix-len and -suffix-len together:", 1)
    check_count(num_prefixes, "--prefix-repetition-num-prefixes", 1)
    check_count(output_len, "--prefix-repetition-output-len", 1)
    if settings.num_prompts < num_prefixes:
        raise InvalidSetting(
            f"--num-prompts {settings.num_prompts} is less than --prefix-repetition-num-prefixes {num_prefixes}"
        )
    random = generator(settings.seed, "prompts")
    num_drawn = num_after_opening(vocabulary, prefix_len + suffix_len)
    num_shared = min(max(prefix_len - len(vocabulary.opening_ids), 0), num_drawn)
    prefixes = [fitted(vocabulary, draw_ids(vocabulary, num_shared, random), random) for _ in range(num_prefixes)]
    groups = random.permutation([index % num_prefixes for index in range(settings.num_prompts)])
    passages = [
        fitted(vocabulary, prefixes[group].token_ids + draw_ids(vocabulary, num_drawn - num_shared, random), random)
        for group in groups.tolist()
    ]
    conversations = [Conversation((first_turn(vocabulary, passage, output_len),)) for passage in passages]
    return described(settings, conversations, passages, {"prefix_tokens": prefix_len, "num_prefixes": num_prefixes})
