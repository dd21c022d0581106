"""From the name of a dataset to its prompts, and the datasets of random tokens. All raise `InvalidSetting`.

`random` is that of `vllm bench serve`: the prefix comes on top of the input length, and what a server adds to a text is
taken off it. In `prefix_repetition` groups of prompts begin with the same tokens, in random order; every prompt has
prefix_len + suffix_len tokens, what a server adds counts as part of the prefix, and groups differ by at most one
request, so that all `--num-prompts` are made. In `multi_turn` each prompt holds all that was said before it; what the
model answers is not known here: the client puts it in between.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final

from baton.bench.workload.dataset_settings import (
    AZURE,
    CUSTOM,
    MOONCAKE,
    MULTI_TURN,
    PREFIX_REPETITION,
    RANDOM,
    SHAREGPT,
    Conversation,
    DatasetSettings,
    Turn,
    Workload,
)
from baton.bench.workload.files import make_azure, make_custom, make_mooncake, make_sharegpt
from baton.bench.workload.passages import (
    Passage,
    Vocabulary,
    described,
    draw_ids,
    drawn,
    first_turn,
    fitted,
    generator,
    lengths_around,
    num_after_opening,
)
from baton.runtime.settings import require_allowed
from baton.wire.errors import InvalidSetting

_OUTPUT_LENGTHS = ("random", "prefix_repetition", "multi_turn", "sharegpt", "custom")


def make_random(settings: DatasetSettings, vocabulary: Vocabulary) -> Workload:
    """`num_prompts` conversations of one turn, lengths uniform around the ones asked for."""
    num, ratio, prefix_len = settings.num_prompts, settings.random_range_ratio, settings.random_prefix_len
    random = generator(settings.seed, "prompts")
    num_opening, num_long = len(vocabulary.opening_ids), round(settings.random_long_share * num)
    input_lens = lengths_around(max(settings.random_input_len - num_opening, 0), ratio, num, 0, random)
    if num_long:
        long_lens = lengths_around(max(settings.random_long_input_len - num_opening, 0), ratio, num_long, 0, random)
        for place, length in zip(random.permutation(num).tolist(), long_lens, strict=False):
            input_lens[place] = length
    output_lens = lengths_around(settings.random_output_len, ratio, num, 1, random)
    if prefix_len + min(input_lens) < 1:
        raise InvalidSetting(f"--random-input-len {settings.random_input_len} leaves no token for some prompts")
    prefix = drawn(vocabulary, prefix_len, random).token_ids
    passages = [drawn(vocabulary, length, random, prefix) for length in input_lens]
    turns = [first_turn(vocabulary, *asked) for asked in zip(passages, output_lens, strict=True)]
    facts = {"prefix_tokens": prefix_len, "range_ratio": ratio, "long_prompts": num_long}
    return described(settings, [Conversation((turn,)) for turn in turns], passages, facts)


def make_prefix_repetition(settings: DatasetSettings, vocabulary: Vocabulary) -> Workload:
    """`num_prompts` conversations of one turn."""
    prefix_len, suffix_len = settings.prefix_repetition_prefix_len, settings.prefix_repetition_suffix_len
    num_prefixes, output_len = settings.prefix_repetition_num_prefixes, settings.prefix_repetition_output_len
    if not prefix_len + suffix_len:
        raise InvalidSetting("--prefix-repetition-suffix-len must be above 0 where the prefix has no tokens")
    if settings.num_prompts < num_prefixes:
        raise InvalidSetting(f"--num-prompts {settings.num_prompts} are fewer than {num_prefixes} prefixes")
    random = generator(settings.seed, "prompts")
    num_drawn = num_after_opening(vocabulary, prefix_len + suffix_len)
    num_shared = min(max(prefix_len - len(vocabulary.opening_ids), 0), num_drawn)
    prefixes = [drawn(vocabulary, num_shared, random).token_ids for _ in range(num_prefixes)]
    groups = random.permutation([index % num_prefixes for index in range(settings.num_prompts)]).tolist()
    passages = [drawn(vocabulary, num_drawn - num_shared, random, prefixes[group]) for group in groups]
    conversations = [Conversation((first_turn(vocabulary, passage, output_len),)) for passage in passages]
    return described(settings, conversations, passages, {"prefix_tokens": prefix_len, "num_prefixes": num_prefixes})


def make_multi_turn(settings: DatasetSettings, vocabulary: Vocabulary) -> Workload:
    """`num_prompts` conversations; all begin with the same system prompt."""
    ratio = settings.multi_turn_range_ratio
    random = generator(settings.seed, "prompts")
    num_system = max(settings.multi_turn_system_len - len(vocabulary.opening_ids), 0)
    system = drawn(vocabulary, num_system, random)
    passages: list[Passage] = []
    conversations = []
    for num_turns in lengths_around(settings.multi_turn_num_turns, ratio, settings.num_prompts, 1, random):
        lengths = lengths_around(settings.multi_turn_user_len, ratio, num_turns, 1, random)
        added = [draw_ids(vocabulary, length, random) for length in lengths]
        added[0] = system.token_ids + added[0]
        said = [fitted(vocabulary, token_ids, random) for token_ids in added]
        output_lens = lengths_around(settings.multi_turn_output_len, ratio, num_turns, 1, random)
        turns = [Turn(one.token_ids, one.text, length) for one, length in zip(said, output_lens, strict=True)]
        conversations.append(Conversation((first_turn(vocabulary, said[0], output_lens[0]), *turns[1:])))
        passages += said
    facts = {"system_tokens": settings.multi_turn_system_len, "range_ratio": ratio}
    return described(settings, conversations, passages, facts)


_MAKERS: Final[dict[str, Callable[[DatasetSettings, Vocabulary], Workload]]] = {
    RANDOM: make_random,
    PREFIX_REPETITION: make_prefix_repetition,
    MULTI_TURN: make_multi_turn,
    SHAREGPT: make_sharegpt,
    CUSTOM: make_custom,
    MOONCAKE: make_mooncake,
    AZURE: make_azure,
}


def make_workload(settings: DatasetSettings, vocabulary: Vocabulary) -> Workload:
    """The conversations of the dataset that `settings` name. Raises `InvalidSetting`."""
    if settings.dataset_name not in _MAKERS:
        raise InvalidSetting(f"--dataset-name {settings.dataset_name!r:.40} is not one of {', '.join(_MAKERS)}")
    require_allowed(settings)
    # `--input-len` and `--output-len` beat the flags of a dataset
    if settings.input_len is not None:
        settings = dataclasses.replace(settings, random_input_len=settings.input_len)
    if settings.output_len is not None:
        lengths: dict[str, Any] = {f"{name}_output_len": settings.output_len for name in _OUTPUT_LENGTHS}
        settings = dataclasses.replace(settings, **lengths)
    return _MAKERS[settings.dataset_name](settings, vocabulary)
