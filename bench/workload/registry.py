"""From the name of a dataset to its prompts. The one place that knows all datasets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Final

from bench.workload import custom, multi_turn, random_lengths, shared_prefix, sharegpt, traces
from bench.workload.dataset_settings import (
    AZURE,
    CUSTOM,
    MOONCAKE,
    MULTI_TURN,
    PREFIX_REPETITION,
    RANDOM,
    SHAREGPT,
    DatasetSettings,
    check_count,
)
from bench.workload.vocabulary import Vocabulary
from bench.workload.workload import Workload
from wire.errors import InvalidSetting

__all__ = ["Workload", "make_workload"]

_MAKERS: Final[dict[str, Callable[[DatasetSettings, Vocabulary], Workload]]] = {
    RANDOM: random_lengths.make,
    PREFIX_REPETITION: shared_prefix.make,
    MULTI_TURN: multi_turn.make,
    SHAREGPT: sharegpt.make,
    CUSTOM: custom.make,
    MOONCAKE: traces.make_mooncake,
    AZURE: traces.make_azure,
}


def make_workload(settings: DatasetSettings, vocabulary: Vocabulary) -> Workload:
    """The conversations of the dataset that `settings` name. Raises `InvalidSetting`."""
    if settings.dataset_name not in _MAKERS:
        raise InvalidSetting(f"--dataset-name {settings.dataset_name!r:.40} is not one of {', '.join(_MAKERS)}")
    check_count(settings.num_prompts, "--num-prompts", 1)
    return _MAKERS[settings.dataset_name](_with_general_lengths(settings), vocabulary)


def _with_general_lengths(settings: DatasetSettings) -> DatasetSettings:
    """`--input-len` and `--output-len` beat the flags of a dataset."""
    if settings.input_len is not None:
        check_count(settings.input_len, "--input-len", 1)
        settings = dataclasses.replace(settings, random_input_len=settings.input_len)
    if settings.output_len is not None:
        check_count(settings.output_len, "--output-len", 1)
        settings = dataclasses.replace(
            settings,
            random_output_len=settings.output_len,
            prefix_repetition_output_len=settings.output_len,
            multi_turn_output_len=settings.output_len,
            sharegpt_output_len=settings.output_len,
            custom_output_len=settings.output_len,
        )
    return settings
