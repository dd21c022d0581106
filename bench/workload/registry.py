"""From the name of a dataset to its prompts. The one place that knows all datasets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final

from bench.workload.dataset_settings import (
    AZURE,
    CUSTOM,
    MOONCAKE,
    MULTI_TURN,
    PREFIX_REPETITION,
    RANDOM,
    SHAREGPT,
    DatasetSettings,
    check_counts,
)
from bench.workload.files import make_custom, make_sharegpt
from bench.workload.synthetic import make_multi_turn, make_prefix_repetition, make_random
from bench.workload.traces import make_azure, make_mooncake
from bench.workload.turns import Workload
from bench.workload.vocabulary import Vocabulary
from wire.errors import InvalidSetting

_MAKERS: Final[dict[str, Callable[[DatasetSettings, Vocabulary], Workload]]] = {
    RANDOM: make_random,
    PREFIX_REPETITION: make_prefix_repetition,
    MULTI_TURN: make_multi_turn,
    SHAREGPT: make_sharegpt,
    CUSTOM: make_custom,
    MOONCAKE: make_mooncake,
    AZURE: make_azure,
}
_OUTPUT_LENGTHS = ("random", "prefix_repetition", "multi_turn", "sharegpt", "custom")


def make_workload(settings: DatasetSettings, vocabulary: Vocabulary) -> Workload:
    """The conversations of the dataset that `settings` name. Raises `InvalidSetting`."""
    if settings.dataset_name not in _MAKERS:
        raise InvalidSetting(f"--dataset-name {settings.dataset_name!r:.40} is not one of {', '.join(_MAKERS)}")
    check_counts(settings, num_prompts=1, input_len=1, output_len=1)
    # `--input-len` and `--output-len` beat the flags of a dataset
    if settings.input_len is not None:
        settings = dataclasses.replace(settings, random_input_len=settings.input_len)
    if settings.output_len is not None:
        lengths: dict[str, Any] = {f"{name}_output_len": settings.output_len for name in _OUTPUT_LENGTHS}
        settings = dataclasses.replace(settings, **lengths)
    return _MAKERS[settings.dataset_name](settings, vocabulary)
