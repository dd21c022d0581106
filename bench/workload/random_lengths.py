"""Dataset `random`: prompts of random tokens, lengths uniform around the ones asked for.

As in `vllm bench serve`, the prefix comes on top of the input length, and what a server adds to a text is taken off it.
"""

from __future__ import annotations

from bench.workload.dataset_settings import DatasetSettings, check_count, check_ratio
from bench.workload.passages import draw_ids, first_turn, fitted, lengths_around
from bench.workload.seeds import generator
from bench.workload.turns import Conversation
from bench.workload.vocabulary import Vocabulary
from bench.workload.workload import Workload, described
from wire.errors import InvalidSetting


def make(settings: DatasetSettings, vocabulary: Vocabulary) -> Workload:
    """`num_prompts` conversations of one turn. Raises `InvalidSetting`."""
    num, ratio, prefix_len = settings.num_prompts, settings.random_range_ratio, settings.random_prefix_len
    check_count(settings.random_input_len, "--random-input-len", 0)
    check_count(settings.random_output_len, "--random-output-len", 1)
    check_count(prefix_len, "--random-prefix-len", 0)
    check_ratio(ratio, "--random-range-ratio")
    random = generator(settings.seed, "prompts")
    input_len = max(settings.random_input_len - len(vocabulary.opening_ids), 0)
    input_lens = lengths_around(input_len, ratio, num, 0, random)
    output_lens = lengths_around(settings.random_output_len, ratio, num, 1, random)
    if prefix_len + min(input_lens) < 1:
        raise InvalidSetting(f"--random-input-len {settings.random_input_len} leaves no token for some prompts")
    prefix = fitted(vocabulary, draw_ids(vocabulary, prefix_len, random), random).token_ids
    passages = [fitted(vocabulary, prefix + draw_ids(vocabulary, length, random), random) for length in input_lens]
    conversations = [
        Conversation((first_turn(vocabulary, passage, output_len),))
        for passage, output_len in zip(passages, output_lens, strict=True)
    ]
    return described(settings, conversations, passages, {"prefix_tokens": prefix_len, "range_ratio": ratio})
