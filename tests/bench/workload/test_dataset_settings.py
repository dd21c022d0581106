from __future__ import annotations

import dataclasses

from baton.bench.workload.dataset_settings import DatasetSettings
from baton.runtime.command_line import CommandParser
from baton.runtime.settings import add_flags, as_flags, resolve


def parsed(*arguments: str) -> DatasetSettings:
    parser = CommandParser(prog="baton")
    add_flags(parser, DatasetSettings)
    return resolve(DatasetSettings, parser.parse_args(arguments), {})


def test_flags_are_those_of_vllm() -> None:
    command = (
        "--dataset-name prefix_repetition --dataset-path file --num-prompts 7 --seed 3 --disable-shuffle "
        "--no-oversample --input-len 1 --output-len 2 --random-input-len 3 --random-output-len 4 "
        "--random-range-ratio 0.5 --random-prefix-len 6 --prefix-repetition-prefix-len 7 "
        "--prefix-repetition-suffix-len 8 --prefix-repetition-num-prefixes 9 --prefix-repetition-output-len 10 "
        "--sharegpt-output-len 11 --custom-output-len -1"
    )
    settings = parsed(*command.split())
    assert dataclasses.astuple(settings)[:8] == ("prefix_repetition", "file", 7, 3, True, True, 1, 2)
    assert (settings.random_range_ratio, settings.sharegpt_output_len, settings.custom_output_len) == (0.5, 11, -1)
    assert parsed(*as_flags(settings)) == settings
