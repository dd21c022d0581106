"""`python -m tests.engine.models.family_time`: what a layer of each family costs on one core, with random weights.

Each line is a family with the shape of one of its models, but few layers and a small vocabulary: the least milliseconds
of processor time that a step takes. Steps decode 1 and 8 tokens behind contexts of 512, or compute a prompt of 512. It
takes some minutes; `--only` names families, and `--attention-backend torch` measures what there was without kernels.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from baton.engine.build import build_engine
from baton.engine.runner.kv_memory import allocate_private
from baton.engine.scheduler.request import ScheduledRequest
from baton.engine.scheduler.step import Step
from baton.engine.settings import EngineSettings
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams

CONTEXT, BLOCK_SIZE, BATCH = 512, 16, 8
_BLOCKS = CONTEXT // BLOCK_SIZE + 1
Shape = tuple[str, str, Mapping[str, Any]]
"""Its architecture, its type in transformers, and its sizes."""
_COMMON: Mapping[str, Any] = {"vocab_size": 1024, "num_hidden_layers": 4, "bos_token_id": None, "eos_token_id": None}
_ROUTED: Mapping[str, Any] = {"n_routed_experts": 16, "num_experts_per_tok": 6, "n_shared_experts": 2}
SHAPES: Mapping[str, Shape] = {
    "qwen3-0.6b": (
        "Qwen3ForCausalLM",
        "qwen3",
        {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8},
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        "gpt_oss",
        {"hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 4, "num_hidden_layers": 2},
    ),
    "gemma2-2b": (
        "Gemma2ForCausalLM",
        "gemma2",
        {"hidden_size": 2304, "intermediate_size": 9216, "num_attention_heads": 8, "num_key_value_heads": 4},
    ),
    "gemma3-1b": (
        "Gemma3ForCausalLM",
        "gemma3_text",
        {"hidden_size": 1152, "intermediate_size": 6912, "num_attention_heads": 4, "num_key_value_heads": 1},
    ),
    "qwen3-next": (
        "Qwen3NextForCausalLM",
        "qwen3_next",
        {"num_experts": 16, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
    ),
    "deepseek-v2-lite": (
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        {
            **_ROUTED,
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "first_k_dense_replace": 1,
            "num_hidden_layers": 2,
        },
    ),
    "lfm2-350m": (
        "Lfm2ForCausalLM",
        "lfm2",
        {
            "hidden_size": 1024,
            "intermediate_size": 6656,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
        },
    ),
}


def write_config(name: str, folder: Path) -> None:
    """The `config.json` of a family."""
    architecture, kind, fields = SHAPES[name]
    config = AutoConfig.for_model(kind, **{**_COMMON, **fields})
    config.architectures = [architecture]
    config.dtype = "bfloat16"
    config.save_pretrained(folder)


def _request(number: int, first: int, count: int) -> ScheduledRequest:
    token_ids = tuple(7 * place % 1000 for place in range(first + count))
    table = tuple(range(number * _BLOCKS, (number + 1) * _BLOCKS))
    given, params = token_ids[first:], DecodingParams(temperature=0.0)
    key = RequestKey.numbered(1 + number)
    return ScheduledRequest(
        key, first, count, given if count > 1 else token_ids, Prompt(token_ids), table, params, True
    )


def measure(name: str, folder: Path, rounds: int, backend: str) -> str:
    """A line of the table."""
    write_config(name, folder)
    settings = EngineSettings(
        str(folder),
        load_format="dummy",
        attention_backend=backend,
        max_model_len=1024,
        num_blocks=_BLOCKS * BATCH,
        speculative_config="none",
        num_threads=1,
    )
    engine = build_engine(settings, allocate_private)
    runner = engine.runner
    steps = [
        Step((_request(0, CONTEXT - 1, 1),)),
        Step(tuple(_request(number, CONTEXT - 1, 1) for number in range(BATCH))),
        Step((_request(0, 0, CONTEXT),)),
    ]
    least = []
    for step, repeats in zip(steps, (8, 4, 1), strict=True):
        times = []
        for _ in range(rounds * repeats + 1):
            begun_s = time.process_time()
            runner.launch(step).result()
            times.append(time.process_time() - begun_s)
        least.append(f"{1e3 * min(times):.2f}")
    return f"| {name} | {' | '.join(least)} |"


def main(arguments: Sequence[str]) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--attention-backend", default="auto")
    chosen = parser.parse_args(arguments)
    sys.stdout.write("| family | decode 1, ms | decode 8, ms | prompt of 512, ms |\n|---|---:|---:|---:|\n")
    for name in chosen.only:
        with tempfile.TemporaryDirectory() as folder:
            sys.stdout.write(f"{measure(name, Path(folder), chosen.rounds, chosen.attention_backend)}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
