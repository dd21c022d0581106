"""How long a prompt takes when it is computed, and when its KV comes back from memory, a disk or a server, in turns.

    python -m tests.engine.offload_time                                  # Qwen3-0.6B's shapes, random weights, bfloat16
    python -m tests.engine.offload_time --shapes small --dtype float32 --num-tokens 64 256 1024 4096
    python -m tests.engine.offload_time --shapes small --kv-disk FOLDER  # from files that are not in the page cache
    python -m tests.engine.offload_time --kv-store-url redis://127.0.0.1:6379/0
    python -m tests.engine.offload_time --shapes small --tensor-parallel-size 2 --rank-pools own

Each round computes a prompt that nobody has seen, with and without a tier; has others push it out of the pool, while
the longest step says what saving costs; and asks for it twice again, each time pushed out before: once it is loaded
whatever it takes, once the engine chooses. Times are to its first token.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from baton.engine.build import build_engine
from baton.engine.cache import load_choice
from baton.engine.core import EngineCore
from baton.engine.runner.kv_memory import allocate_private, allocate_shared
from baton.engine.settings import AUTO, OWN, SHARED, VALKEY, EngineSettings
from baton.ranks.executor.choose import open_executor
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams
from tests.checkpoints import make_checkpoint

SHAPES = {
    "qwen3-0.6b": (
        "qwen3",
        {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
    ),
    "small": (
        "llama",
        {
            "hidden_size": 512,
            "intermediate_size": 1536,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
        },
    ),
}
ONE_TOKEN = DecodingParams(temperature=0, max_tokens=1, ignore_eos=True)
_LINGER_S = 3.0
_WAIT_S = 0.002
"""As long as a node's loop waits while nothing is ready."""


def model_of(folder: Path, shapes: str, max_position: int) -> str:
    """A folder with the config of these shapes, for random weights."""
    family, fields = SHAPES[shapes]
    make_checkpoint(folder, family, max_position=max_position)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    return str(folder)


class Meter:
    """Serves prompts on one engine, whose pool has room for one of them."""

    def __init__(self, model: str, num_tokens: int, **chosen: Any) -> None:
        settings = EngineSettings(model=model, load_format="dummy", num_blocks=num_tokens // 16 + 3, **chosen)
        allocate = allocate_shared if settings.num_ranks > 1 else allocate_private
        engine = build_engine(settings, allocate, open_executor=open_executor)
        self._executor = engine.executor
        engine.learn_costs()
        self.core: EngineCore = engine.core
        self.longest_step_ms = 0.0
        self._num_requests = 0

    def time_ms(self, token_ids: Sequence[int]) -> float:
        """Until the first token."""
        self._num_requests += 1
        self.core.add(RequestKey.numbered(self._num_requests), Prompt.of(token_ids), ONE_TOKEN)
        begun_s = time.perf_counter()
        self.longest_step_ms = 0.0
        while self.core.has_work:
            step_s = time.perf_counter()
            outputs = self.core.step()
            self.longest_step_ms = max(self.longest_step_ms, 1000 * (time.perf_counter() - step_s))
            if not outputs:
                time.sleep(_WAIT_S)
        return 1000 * (time.perf_counter() - begun_s)

    def close(self) -> None:
        """End the engine."""
        self.core.close()
        self._executor.close()


def cool(folder: str) -> None:
    """Have the tier write all that it has, and the system forget what it knows of the files."""
    time.sleep(_LINGER_S)
    for path in Path(folder).glob("*/*.kv"):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cooled(meter: Meter, prompt: Sequence[int], tier: Mapping[str, Any]) -> float:
    """The time of a prompt, when all is written and nothing of a folder is in the page cache."""
    if folder := tier.get("kv_disk"):
        cool(folder)
    elif "kv_store_url" in tier:
        time.sleep(_LINGER_S)  # until it is written
    return meter.time_ms(prompt)


def measure(model: str, num_tokens: int, num_rounds: int, common: Mapping[str, Any], tier: Mapping[str, Any]) -> None:
    """Print the medians for prompts of so many tokens, one of which no cache has. `common`: of both engines."""
    chance = random.Random(1)
    plain, tiered = Meter(model, num_tokens, **common), Meter(model, num_tokens, **common, **tier)
    found = defaultdict[str, list[float]](list)
    for number in range(num_rounds + 1):
        prompt, *others = ([chance.randrange(300) for _ in range(num_tokens + 1)] for _ in range(3))
        tiered.time_ms(prompt)
        times = {"computed": plain.time_ms(others[0]), "longest step": plain.longest_step_ms}
        times |= {"while saving": tiered.time_ms(others[0]), "longest step then": tiered.longest_step_ms}
        tiered.core.check()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(load_choice, "TOLERANCE_S", 60.0)
            times["loaded"] = cooled(tiered, prompt, tier)
        tiered.time_ms(others[1])
        times["chosen"] = cooled(tiered, prompt, tier)
        for name, value in times.items() if number else ():  # the first round warms up
            found[name].append(value)
    shown = ", ".join(f"{name} {statistics.median(values):.1f} ms" for name, values in found.items())
    shares = (saving / computed for saving, computed in zip(found["while saving"], found["computed"], strict=True))
    sys.stdout.write(f"{num_tokens} tokens: {shown}, ratio while saving {statistics.median(shares):.3f}\n")
    assert tiered.core.offload is not None
    sys.stdout.write(f"    {tiered.core.offload.counters}\n")
    for tier_used in tiered.core.offload.tiers:
        sys.stdout.write(f"    {tier_used.name}: {tier_used.counters}\n")
    sys.stdout.flush()
    plain.close()
    tiered.close()


def main() -> int:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--num-tokens", type=int, nargs="+", default=[2000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--kv-disk", metavar="FOLDER", help="measure the disk tier in this folder")
    parser.add_argument("--kv-store-url", metavar="URL", help="measure the shared store on this server")
    for name in ("tensor", "pipeline"):
        parser.add_argument(f"--{name}-parallel-size", type=int, default=1)
    parser.add_argument("--rank-pools", choices=(AUTO, SHARED, OWN), default=AUTO)
    arguments = parser.parse_args()
    names = ("dtype", "tensor_parallel_size", "pipeline_parallel_size", "rank_pools")
    common = {name: getattr(arguments, name) for name in names}
    tier: dict[str, Any] = {"kv_offloading_size": arguments.gib}
    if arguments.kv_disk:
        tier = {"kv_disk": arguments.kv_disk, "kv_disk_size": arguments.gib}
    elif arguments.kv_store_url:
        tier = {"kv_store": VALKEY, "kv_store_url": arguments.kv_store_url}
    with tempfile.TemporaryDirectory() as folder:
        model = model_of(Path(folder), arguments.shapes, 2 * max(arguments.num_tokens))
        for num_tokens in arguments.num_tokens:
            measure(model, num_tokens, arguments.rounds, common, tier)
    return 0


if __name__ == "__main__":
    sys.exit(main())
