"""From the name of a dataset to its prompts, and the dataset of random tokens. All raise `InvalidSetting`.

`random` is that of `vllm bench serve`: the prefix comes on top of the input length, and what a server adds to a text is
taken off it. Whoever wants its other datasets sends them with `vllm bench serve`, guidellm or aiperf.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from baton.bench.workload.dataset_settings import AZURE, MOONCAKE, RANDOM, DatasetSettings, Workload
from baton.bench.workload.files import make_azure, make_mooncake
from baton.bench.workload.passages import Vocabulary, described, draw_ids, generator, lengths_around, opened
from baton.wire.errors import InvalidSetting


def make_random(settings: DatasetSettings, vocabulary: Vocabulary) -> Workload:
    """`num_prompts` prompts, lengths uniform around the ones asked for."""
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
    prefix = draw_ids(vocabulary, prefix_len, random)
    prompts = [
        opened(vocabulary, prefix + draw_ids(vocabulary, length, random), num_output)
        for length, num_output in zip(input_lens, output_lens, strict=True)
    ]
    facts = {"prefix_tokens": prefix_len, "range_ratio": ratio, "long_prompts": num_long}
    return described(settings, prompts, facts)


_MAKERS: Final[dict[str, Callable[[DatasetSettings, Vocabulary], Workload]]] = {
    RANDOM: make_random,
    MOONCAKE: make_mooncake,
    AZURE: make_azure,
}


def make_workload(settings: DatasetSettings, vocabulary: Vocabulary) -> Workload:
    """The prompts of the dataset that `settings` name. Raises `InvalidSetting`."""
    return _MAKERS[settings.dataset_name](settings, vocabulary)
