"""Settings of `baton bench limits`, and what they mean on this machine."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from bench import lists
from bench.arguments import require_at_least
from program.settings import setting
from wire.errors import InvalidSetting

CEILING_NAMES = ("memcpy", "read_stream", "gemm")
ENGINE_NAMES = (*CEILING_NAMES, "decode_bw_ratio", "prefill_flop_ratio", "attn_ratio")
"""Ceilings and ratios that are measured in one process with an engine."""
HANDOFF_NAMES, KV_NAMES = ("exposed_ratio", "handover_us"), ("kv_bw_ratio", "kv_overhead_us")
SYSTEM_NAMES = ("zmq_round_trip", *KV_NAMES, *HANDOFF_NAMES, "router_us_per_token", "itl_isolation")
"""Those that need several processes: nodes, a router, clients."""
_QUICK_ROUNDS = 2
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_MIN_BUFFER_BYTES, _MAX_BUFFER_BYTES, _QUICK_BUFFER_BYTES = 2**27, 2**31, 2**22
TIMES_CACHE = 4


@dataclass(frozen=True, slots=True)
class LimitsSettings:
    """Settings of `baton bench limits`. What is derived from them raises `InvalidSetting`."""

    model: str = setting("", "checkpoint folder or hub id; empty: the built-in demo model", positional=True)
    only: str = setting("", "measure only these, for example gemm,prefill_flop_ratio; empty: all")
    rounds: int = setting(9, "pairs of ceiling and subject, at least 7 for figures to publish")
    threads: int = setting(0, "compute threads of an engine; 0: what `baton serve` gives one of two nodes")
    cores: str = setting("", "cores to use: the first node's come first, then the second's; empty: all")
    batches: str = setting("1,8,16", "requests that decode together")
    contexts: str = setting("512,1024", "tokens in front of the token that is decoded")
    prompt_tokens: int = setting(512, "length of the prompts of prefill_flop_ratio")
    max_num_batched_tokens: int = setting(512, "token budget of an engine's step: the largest chunk of a prompt")
    json: str = setting("", "file for the results")
    quick: bool = setting(False, "tiny sizes and two rounds: whether it works, not how fast")

    def check(self) -> None:
        """Raise `InvalidSetting` when something cannot be used: before anything is started."""
        require_at_least(self, threads=0, rounds=2, prompt_tokens=1)
        _ = (self.names, self.core_ids, self.context_lens)
        if max(self.batch_sizes) > self.max_num_batched_tokens:
            raise InvalidSetting(f"--max-num-batched-tokens {self.max_num_batched_tokens} is less than a batch")

    @property
    def core_ids(self) -> tuple[int, ...]:
        """The cores to use, each once."""
        return tuple(dict.fromkeys(lists.cores(self.cores)))

    @property
    def num_threads(self) -> int:
        return self.threads or max(1, len(self.core_ids) // 2)

    @property
    def num_rounds(self) -> int:
        return _QUICK_ROUNDS if self.quick else self.rounds

    @property
    def names(self) -> tuple[str, ...]:
        """What is to be measured."""
        every = (*ENGINE_NAMES, *SYSTEM_NAMES)
        chosen = lists.names(self.only, "--only", every)
        return tuple(name for name in every if not chosen or name in chosen)

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        return (1, 2) if self.quick else lists.numbers(self.batches, "--batches")

    @property
    def context_lens(self) -> tuple[int, ...]:
        return (32,) if self.quick else lists.numbers(self.contexts, "--contexts")

    @property
    def num_prompt_tokens(self) -> int:
        return min(64, self.prompt_tokens) if self.quick else self.prompt_tokens

    @property
    def buffer_bytes(self) -> int:
        """Of a buffer that no cache holds: four times the largest cache, from 128 MiB to 2 GiB."""
        size = min(max(_MIN_BUFFER_BYTES, TIMES_CACHE * last_cache_bytes()), _MAX_BUFFER_BYTES)
        return _QUICK_BUFFER_BYTES if self.quick else size


def last_cache_bytes(folder: Path = _CACHES) -> int:
    """Size of the largest cache of a core; 0 where the system does not tell."""
    sizes = [re.fullmatch(r"(\d+)K", file.read_text().strip()) for file in sorted(folder.glob("index*/size"))]
    return max((int(size[1]) * 2**10 for size in sizes if size), default=0)
