from __future__ import annotations

import re
from typing import Any

import pytest

from baton.bench.arguments import parse_settings
from baton.bench.serve.settings import ServeBenchSettings, check, headers, parse_slo, urls
from baton.bench.workload.dataset_settings import DatasetSettings
from baton.runtime.command_line import CommandParser
from baton.wire.errors import InvalidSetting

# fmt: off
VLLM_FLAGS = {
    "backend", "base-url", "burstiness", "dataset-name", "dataset-path", "disable-tqdm", "endpoint", "extra-body",
    "goodput", "header", "host", "ignore-eos", "label", "max-concurrency", "model", "num-prompts", "num-warmups",
    "port", "ramp-up-end-rps", "ramp-up-start-rps", "ramp-up-strategy", "random-input-len", "random-output-len",
    "random-prefix-len", "random-range-ratio", "ready-check-timeout-sec", "request-rate", "result-dir",
    "result-filename", "save-detailed", "save-result", "seed", "served-model-name", "temperature", "tokenizer",
}
# fmt: on


def parse(arguments: list[str]) -> tuple[Any, ...]:
    return parse_settings(CommandParser(), arguments, ServeBenchSettings, DatasetSettings)


def test_help_knows_the_flags_of_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        parse(["--help", "all"])
    flags = set(re.findall(r"^  --([a-z-]+)", capsys.readouterr().out, re.MULTILINE))
    assert VLLM_FLAGS - flags == set()


def test_a_command_for_vllm_is_understood() -> None:
    command = (
        "--backend vllm --model /models/llama --endpoint /v1/completions --dataset-name random --random-input-len 512"
        " --random-output-len 64 --num-prompts 200 --request-rate 4 --goodput ttft:200 tpot:50 --ignore-eos"
        " --save-result --result-dir out --host 10.0.0.1 --port 9000 --seed 7"
    )
    settings, dataset = parse(command.split())
    check(settings)
    assert urls(settings) == ("http://10.0.0.1:9000",)
    assert settings.goodput == ("ttft:200", "tpot:50")
    assert (dataset.num_prompts, dataset.seed, dataset.random_input_len) == (200, 7, 512)


def test_headers_hold_the_api_key_unless_they_say_otherwise() -> None:
    key = {"OPENAI_API_KEY": "secret"}
    assert headers(ServeBenchSettings(), key) == {"Authorization": "Bearer secret"}
    given = ServeBenchSettings(header=("Authorization=Token a=b", "x-run=1"))
    assert headers(given, key) == {"Authorization": "Token a=b", "x-run": "1"}
    assert headers(ServeBenchSettings(), {}) == {}


@pytest.mark.parametrize(
    ("flag", "change"),
    [
        ("--base-url", {"base_url": ("localhost:8000",)}),
        ("--extra-body", {"extra_body": "{"}),
        ("--extra-body", {"extra_body": "[1]"}),
        ("--header", {"header": ("no",)}),
        ("--goodput", {"goodput": ("tbt:5",)}),
        ("--ramp-up-start-rps", {"ramp_up_start_rps": 1.0}),
        ("--ramp-up-strategy", {"ramp_up_strategy": "linear"}),
        ("--ramp-up-strategy", {"ramp_up_strategy": "linear", "ramp_up_start_rps": 4.0, "ramp_up_end_rps": 2.0}),
        (
            "--ramp-up-strategy",
            {"ramp_up_strategy": "linear", "ramp_up_start_rps": 1.0, "ramp_up_end_rps": 2.0, "request_rate": 3.0},
        ),
    ],
)
def test_what_cannot_be_used_is_named(flag: str, change: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting, match=flag):
        check(ServeBenchSettings(**change))


@pytest.mark.parametrize(
    "word", ["ttft", "ttft:", "ttft:fast", "ttft:-1", "ttft:nan", "ttft:inf", "tbt:5", "", "ttft:1,ttft:2", "ttft=5"]
)
def test_a_goal_that_is_none_is_an_error(word: str) -> None:
    with pytest.raises(InvalidSetting, match="--goodput"):
        parse_slo([word])
