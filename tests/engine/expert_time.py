"""`python -m tests.engine.expert_time FOLDER`: what steps of a mixture of experts cost, with random weights.

Decode steps by their number of sequences, and prompts of 512 and 2,048 tokens, computed in turns; of each the fastest
and the median. Beside decode steps stands the share of the memory's speed: the bytes of the weights that a step reads,
over what this machine reads in that time. `--layers` takes the first layers only.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch

from baton.engine.build import Engine, build_engine
from baton.engine.models.config import ModelConfig, load_config
from baton.engine.models.decoder import Decoder
from baton.engine.models.model_costs import share_of_experts
from baton.engine.models.ops.torch_ops import TorchOps
from baton.engine.models.quantization.choose import choose_quantization
from baton.engine.runner.kv_memory import allocate_private
from baton.engine.scheduler.request import ScheduledRequest
from baton.engine.scheduler.step import Step
from baton.engine.settings import EngineSettings
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams

_CONTEXT, _BLOCK_SIZE, _BATCHES, _PROMPTS = 64, 16, (1, 4, 16), (512, 2048)
_READ_BYTES = 1 << 28
"""Of the stream that the memory's speed is measured by: more than any cache holds."""


def decode_step(num_sequences: int, turn: int) -> Step:
    """Each sequence has other tokens, and so other experts."""
    blocks = -(-(_CONTEXT + 1) // _BLOCK_SIZE)
    shares = []
    for number in range(num_sequences):
        token_ids = tuple((37 * place + 1009 * number + 7919 * turn) % 30000 for place in range(_CONTEXT + 1))
        table = tuple(range(number * blocks, (number + 1) * blocks))
        shares.append(_request(number, _CONTEXT, 1, token_ids, table))
    return Step(tuple(shares))


def prompt_step(num_tokens: int) -> Step:
    """One prompt, from its first token to its last."""
    token_ids = tuple(37 * place % 30000 for place in range(num_tokens))
    return Step((_request(0, 0, num_tokens, token_ids, tuple(range(-(-num_tokens // _BLOCK_SIZE)))),))


def _request(
    number: int, start: int, count: int, token_ids: tuple[int, ...], table: tuple[int, ...]
) -> ScheduledRequest:
    params = DecodingParams(temperature=0.0)
    return ScheduledRequest(
        RequestKey.numbered(number + 1), start, count, token_ids, Prompt(token_ids), table, params, True
    )


def read_bytes_per_s(num_threads: int) -> float:
    """The fastest of some passes over memory, in which each thread multiplies the halves of its share."""
    shares = [np.ones(_READ_BYTES // 4 // num_threads, dtype=np.float32) for _ in range(num_threads)]
    seconds = []
    with ThreadPoolExecutor(num_threads) as threads:
        for _ in range(8):
            begun_s = time.perf_counter()
            list(threads.map(lambda share: np.dot(*np.split(share, 2)), shares))
            seconds.append(time.perf_counter() - begun_s)
    return _READ_BYTES / min(seconds)


def with_layers(folder: Path, num_layers: int, to: Path) -> None:
    """A copy of the folder's config and tokenizer for a model with so many layers."""
    shutil.copytree(folder, to, dirs_exist_ok=True)
    content = json.loads((to / "config.json").read_text())
    content["num_hidden_layers"] = num_layers
    if "layer_types" in content:
        content["layer_types"] = content["layer_types"][:num_layers]
    (to / "config.json").write_text(json.dumps(content))


def measured(engine: Engine, rounds: int, prompts: tuple[int, ...]) -> dict[str, list[float]]:
    """The seconds of all kinds of steps, in turns."""
    found: dict[str, list[float]] = {}
    for turn in range(rounds + 1):
        steps = {f"decode {count:2}": decode_step(count, turn) for count in _BATCHES}
        if turn < 4:
            steps |= {f"prompt {count}": prompt_step(count) for count in prompts}
        for name, step in steps.items():
            begun_s = time.perf_counter()
            engine.runner.launch(step).result()
            if turn:  # the first of a kind may take longer
                found.setdefault(name, []).append(time.perf_counter() - begun_s)
    return found


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes that a decode step reads: of experts, those of its tokens; of all else everything but the embedding."""

    experts: int
    others: int
    config: ModelConfig

    def read(self, num_tokens: int) -> float:
        """The bytes of a step with so many tokens, if they choose evenly."""
        return self.others + self.experts * share_of_experts(self.config, num_tokens)


def sizes_of(folder: Path, quantization: str) -> Sizes:
    """By the parameters of the model, whose memory is not taken."""
    config = load_config(folder)
    method = choose_quantization(quantization, config, folder)
    shapes = Decoder(config, torch.bfloat16, "meta", TorchOps(), quantization=method)
    held = {each.name: each.num_bytes for each in shapes.parameters() if each.name != "embedding"}
    experts = sum(count for name, count in held.items() if ".experts." in name)
    return Sizes(experts, sum(held.values()) - experts, config)


def print_table(found: dict[str, list[float]], sizes: Sizes, bytes_per_s: float) -> None:
    """Each kind of step; of decode steps the share of the memory's speed that the fastest has."""
    sys.stdout.write(f"memory: {bytes_per_s / 1e9:.1f} GB/s\n")
    for name, seconds in found.items():
        kind, count = name.split()
        line = f"{name:11}: fastest {1000 * min(seconds):8.2f} ms, median {1000 * median(seconds):8.2f} ms"
        if kind == "decode":
            line += f", {sizes.read(int(count)) / bytes_per_s / min(seconds):.2f} of the memory's speed"
        sys.stdout.write(f"{line}\n")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.engine.expert_time", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=0, help="how many; 0: all of them")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--prompts", type=int, nargs="*", default=list(_PROMPTS))
    asked = parser.parse_args()
    num_all = load_config(asked.folder).num_layers
    num_layers = asked.layers or num_all
    with tempfile.TemporaryDirectory() as folder:
        with_layers(asked.folder, num_layers, Path(folder))
        begun_s = time.perf_counter()
        engine = build_engine(settings_of(folder, asked), allocate_private)
        sys.stdout.write(f"{num_layers} of {num_all} layers, started in {time.perf_counter() - begun_s:.1f} s\n")
        found = measured(engine, asked.rounds, tuple(asked.prompts))
        sizes = sizes_of(Path(folder), asked.quantization)
    print_table(found, sizes, read_bytes_per_s(asked.threads))


def settings_of(folder: str, asked: argparse.Namespace) -> EngineSettings:
    """Of an engine for these steps."""
    longest = max((*asked.prompts, 128))
    return EngineSettings(
        folder,
        load_format="dummy",
        quantization=asked.quantization,
        num_threads=asked.threads,
        max_model_len=longest + _BLOCK_SIZE,
        max_num_batched_tokens=longest,
        max_num_seqs=max(_BATCHES),
        num_blocks=max(longest // _BLOCK_SIZE + 2, max(_BATCHES) * (_CONTEXT // _BLOCK_SIZE + 1) + 1),
    )


if __name__ == "__main__":
    main()
