"""Plans against figures that were computed by hand from the published shapes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from baton.engine.models.config import parse_config
from baton.engine.models.model_costs import (
    attention_flop,
    head_flop,
    pair_in_tokens,
    product_flop_per_token,
    share_of_experts,
)
from baton.launch.cli import main
from baton.launch.plan.devices import GPUS
from baton.launch.plan.rank_size import RankSize, stage_sizes
from tests.launch.plan.model_configs import DEEPSEEK_V3, GPT_OSS_20B, LLAMA_3_8B, QWEN3_06B

_LLAMA_WEIGHTS = 2 * 8_030_261_248
_LLAMA_TABLE = 2 * 128256 * 4096
_QWEN_WEIGHTS = 2 * (596_049_920 + 28 * (16 + 8 - 2) * 128)
"""The norm of queries and that of keys are held once for each head."""


def _sizes(model: Mapping[str, Any], tensor_ranks: int = 1, stages: int = 1) -> list[RankSize]:
    return stage_sizes(parse_config(dict(model)), "bfloat16", "bfloat16", 16, tensor_ranks, stages)


def _written(folder: Path, model: Mapping[str, Any]) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(model))
    return str(path)


def _planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(
    ("model", "weights_bytes", "kv_bytes"),
    [
        (LLAMA_3_8B, _LLAMA_WEIGHTS, 2 * 8 * 128 * 32 * 2),
        (QWEN3_06B, _QWEN_WEIGHTS, 2 * 8 * 128 * 28 * 2),
        # the correction of routing scores is float32, in 58 layers
        (DEEPSEEK_V3, 2 * 671_026_419_200 + 2 * 256 * 58, (512 + 64) * 61 * 2),
    ],
)
def test_weights_and_kv_of_published_models(model: Mapping[str, Any], weights_bytes: int, kv_bytes: int) -> None:
    (size,) = _sizes(model)
    assert size.weights_bytes == weights_bytes
    assert size.layout.block_bytes == 16 * kv_bytes


def test_experts_in_mxfp4_are_counted_as_they_are_held() -> None:
    (size,) = _sizes(GPT_OSS_20B)
    matrices = 24 * 32 * 3 * 2880 * 2880
    scales, biases = matrices // 32, 24 * 32 * (2 * 2880 + 2880) * 2
    assert size.expert_bytes == 2 * matrices + scales + biases
    assert size.layout.block_bytes == 16 * 2 * 8 * 64 * 24 * 2


@pytest.mark.parametrize(("tensor_ranks", "kv_heads"), [(2, 4), (4, 2), (8, 1), (16, 1)])
def test_ranks_share_heads_and_repeat_them_where_there_are_fewer(tensor_ranks: int, kv_heads: int) -> None:
    (size,) = _sizes(LLAMA_3_8B, tensor_ranks)
    assert size.layout.block_bytes == 16 * 2 * kv_heads * 128 * 32 * 2
    assert _LLAMA_WEIGHTS / tensor_ranks <= size.weights_bytes <= _LLAMA_WEIGHTS / tensor_ranks + 2.2 * _LLAMA_TABLE


def test_latents_are_whole_in_every_rank() -> None:
    model = {**DEEPSEEK_V3, "num_hidden_layers": 2}
    assert _sizes(model, 8)[0].layout == _sizes(model)[0].layout


def test_stages_have_neighbouring_layers_and_the_tables_at_their_ends() -> None:
    first, last = _sizes(LLAMA_3_8B, stages=2)
    layer = (_LLAMA_WEIGHTS - 2 * _LLAMA_TABLE - 2 * 4096) // 32
    assert (first.weights_bytes, last.weights_bytes) == (
        16 * layer + _LLAMA_TABLE,
        16 * layer + _LLAMA_TABLE + 2 * 4096,
    )
    assert [stage.layout.num_layers for stage in _sizes(LLAMA_3_8B, stages=5)] == [7, 7, 6, 6, 6]


def test_a_tied_table_is_in_the_first_and_the_last_stage() -> None:
    first, middle, last = stages = _sizes(QWEN3_06B, stages=3)
    table = 2 * 151936 * 1024
    assert (first.table_bytes, middle.table_bytes, last.table_bytes) == (table, 0, 0)
    # there it is the matrix of the head
    assert sum(stage.weights_bytes for stage in stages) == _QWEN_WEIGHTS + table


def test_operations_of_a_token() -> None:
    llama, deepseek = parse_config(dict(LLAMA_3_8B)), parse_config(dict(DEEPSEEK_V3))
    norms, table = 65 * 4096, 128256 * 4096
    assert product_flop_per_token(llama) == 2 * (8_030_261_248 - norms - 2 * table)
    assert head_flop(llama) == 2 * table
    assert attention_flop(llama, 1023) == 4 * 32 * 128 * 1024 * 32
    # attention has seven tenths of products' rate
    assert 0.7 * pair_in_tokens(llama) * product_flop_per_token(llama) == pytest.approx(4 * 32 * 128 * 32)
    # DeepSeek's report names 37 billion weights that a token activates, head and embedding included
    active = product_flop_per_token(deepseek) / 2 + 2 * 129280 * 7168
    assert active == pytest.approx(37.5e9, rel=0.02)
    assert attention_flop(deepseek, 0) == 2 * 128 * (512 + 64 + 512) * 61
    assert share_of_experts(deepseek, 1) == pytest.approx(8 / 256)


def test_windows_bound_what_a_token_attends_to() -> None:
    config = parse_config(dict(GPT_OSS_20B))
    assert attention_flop(config, 9999) == 4 * 64 * 64 * (12 * 128 + 12 * 10_000)


def test_a_group_has_the_kv_of_its_nodes_and_each_handoff_is_between_two_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = _written(tmp_path, LLAMA_3_8B)
    alone = _planned(capsys, model)
    group = _planned(capsys, model, "--dp", "4", "--prefill-dp", "2")
    assert (group["num_prefill"], group["num_decode"]) == (2, 4)
    assert {**group, "num_prefill": 1, "num_decode": 1} == alone
    tokens = 4 * _planned(capsys, model, "--decode-tp", "2")["decode"]["kv_tokens"]
    assert main(["plan", model, "--decode-dp", "4", "--decode-tp", "2"]) == 0
    assert f"a group of 4 such nodes: 8 ranks, {tokens:,} tokens of KV" in capsys.readouterr().out


def test_a_plan_for_uneven_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = _written(tmp_path, LLAMA_3_8B)
    plan = _planned(capsys, model, "--prefill-tp", "2", "--decode-tp", "4", "--context", "4096")
    prefill, decode = plan["prefill"], plan["decode"]
    assert (prefill["num_ranks"], decode["num_ranks"]) == (2, 4)
    assert (prefill["kv_bytes_per_token"], decode["kv_bytes_per_token"]) == (65536, 32768)
    assert plan["max_context"] == 8192
    (handoff,), (together,) = plan["handoffs"], plan["concurrency"]
    assert handoff["num_bytes"] == together["kv_bytes"] == 4096 * 131072
    assert (handoff["bytes_per_rank"], handoff["num_links"]) == (4096 * 32768, 4)
    # a chunk of 2,048 tokens: its KV, over its operations on two GPUs at half of their peak
    flop = 2048 * (2 * 6_979_321_856 + 4 * 32 * 128 * 1025 * 32)
    assert handoff["hiding_bytes_per_s"] == pytest.approx(2048 * 131072 / (flop / (2 * 0.5 * 989e12)))
    assert together["num_sequences"] == decode["num_blocks"] // 256
    # within the share of each GPU, and all of it but for what is needed beside KV
    kv_bytes = decode["kv_tokens"] * decode["kv_bytes_per_token"]
    left = 0.9 * GPUS["h200"].memory_bytes - decode["weights_bytes"] - decode["step_bytes"] - kv_bytes
    assert 0 < left < 2 * 2**30


def test_kv_in_codes_of_8_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = _written(tmp_path, QWEN3_06B)
    plan = _planned(capsys, model, "--dtype", "bfloat16", "--kv-cache-dtype", "fp8")
    assert (plan["kv_dtype"], plan["prefill"]["kv_bytes_per_token"]) == ("fp8_e4m3", 2 * 8 * (128 + 1) * 28)
    assert plan["prefill"]["weights_bytes"] == _QWEN_WEIGHTS


def test_a_draft_model_takes_memory_of_its_own_and_travels_with_the_kv(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "draft").mkdir()
    model, draft = _written(tmp_path, LLAMA_3_8B), _written(tmp_path / "draft", QWEN3_06B)
    asked = json.dumps({"method": "draft_model", "model": draft, "num_speculative_tokens": 4})
    common = (model, "--dtype", "bfloat16", "--context", "4096", "--max-num-seqs", "1", "--speculative-config")
    plain, with_text, with_draft = (
        _planned(capsys, *common, config) for config in ("", '{"method": "ngram", "num_speculative_tokens": 4}', asked)
    )
    assert with_text == plain
    node = with_draft["decode"]
    assert node["weights_bytes"] == _LLAMA_WEIGHTS + _QWEN_WEIGHTS
    assert node["kv_bytes_per_token"] == 131072 + 2 * 2 * 8 * 128 * 28
    assert node["num_blocks"] < plain["decode"]["num_blocks"]
    assert with_draft["handoffs"][0]["num_bytes"] == 4096 * node["kv_bytes_per_token"]
    assert with_draft["concurrency"][0]["step_s"] == plain["concurrency"][0]["step_s"], "of the model alone"


def test_the_demo_model_on_this_machine_is_planned_as_it_is_served(capsys: pytest.CaptureFixture[str]) -> None:
    plan = _planned(capsys, "--gpu", "cpu", "--max-model-len", "256", "--max-num-seqs", "8")
    # as many blocks as eight requests of that length can use
    assert plan["decode"]["num_blocks"] == 8 * 256 // 16
    assert plan["device"]["bytes_per_s"] > 0


@pytest.mark.parametrize(
    ("model", "arguments", "words"),
    [
        (LLAMA_3_8B, ["--tp", "3"], "a prefill node of --tp 3 and --pp 1: 32 attention heads cannot be divided"),
        (LLAMA_3_8B, ["--pp", "33"], "32 layers cannot be divided among 33 stages"),
        (LLAMA_3_8B, ["--gpu", "h20"], "--gpu 'h20' is not one of b200, h200"),
        (LLAMA_3_8B, ["--context", "9000"], "--context 9000 does not fit: the largest here is 8192 tokens"),
        (LLAMA_3_8B, ["--max-model-len", "9000"], "above the model's limit of 8192"),
        (LLAMA_3_8B, ["--tp", "0"], "--tp: 0 is not from 1 to 64"),
        (LLAMA_3_8B, ["--flop-utilization", "2"], "--flop-utilization: 2.0 is not above 0"),
        (DEEPSEEK_V3, ["--gpu", "h200", "--decode-tp", "8"], "prefill node of --tp 1 and --pp 1: .* do not fit into"),
        (LLAMA_3_8B, ["--speculative-config", '{"method": "mtp"}'], "a plan counts draft models, and no heads"),
        (LLAMA_3_8B, ["--speculative-config", "{"], "--speculative-config '{': "),
        (GPT_OSS_20B, ["--tp", "4"], "2880 rows of an expert cannot be divided among 4 ranks in groups of 32"),
    ],
)
def test_what_cannot_be_is_one_clear_line(
    model: Mapping[str, Any],
    arguments: list[str],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", _written(tmp_path, model), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert re.search(words, line)
