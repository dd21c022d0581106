"""Settings of `baton bench limits`, and what they mean on this machine."""

from __future__ import annotations

import os
from dataclasses import dataclass

from program.settings import setting
from wire.errors import InvalidSetting

ENGINE_NAMES = ("memcpy", "read_stream", "gemm", "decode_bw_ratio", "prefill_flop_ratio", "attn_ratio")
"""Ceilings and ratios that are measured in one process with an engine."""
SYSTEM_NAMES = (
    "zmq_round_trip",
    "kv_bw_ratio",
    "kv_overhead_us",
    "exposed_ratio",
    "handover_us",
    "router_us_per_token",
    "itl_isolation",
)
"""Those that need several processes: nodes, a router, clients."""
_QUICK_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class LimitsSettings:
    """Settings of `baton bench limits`."""

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
        _ = (self.names, self.num_rounds, self.num_threads, self.num_prompt_tokens, self.context_lens)
        if max(self.batch_sizes) > self.max_num_batched_tokens:
            raise InvalidSetting(f"--max-num-batched-tokens {self.max_num_batched_tokens} is less than a batch")

    @property
    def core_ids(self) -> tuple[int, ...]:
        """The cores to use. Raises `InvalidSetting`."""
        available = sorted(os.sched_getaffinity(0))
        given = _numbers(self.cores, "--cores", lowest=0) if self.cores else tuple(available)
        if not set(given) <= set(available) or len(set(given)) < len(given):
            raise InvalidSetting(f"--cores {self.cores} are not some of {', '.join(map(str, available))}, each once")
        return given

    @property
    def num_threads(self) -> int:
        """Compute threads of one engine. Raises `InvalidSetting`."""
        if self.threads < 0:
            raise InvalidSetting(f"--threads {self.threads} is not at least 0")
        return self.threads or max(1, len(self.core_ids) // 2)

    @property
    def num_rounds(self) -> int:
        """Pairs of ceiling and subject. Raises `InvalidSetting`."""
        if self.rounds < 2:
            raise InvalidSetting(f"--rounds {self.rounds} is not at least 2: one value has no spread")
        return _QUICK_ROUNDS if self.quick else self.rounds

    @property
    def names(self) -> tuple[str, ...]:
        """What is to be measured. Raises `InvalidSetting`."""
        every = (*ENGINE_NAMES, *SYSTEM_NAMES)
        chosen = tuple(filter(None, (item.strip() for item in self.only.split(","))))
        for name in chosen:
            if name not in every:
                raise InvalidSetting(f"--only {name!r:.40} is not one of {', '.join(every)}")
        return tuple(name for name in every if not chosen or name in chosen)

    def wants(self, name: str) -> bool:
        """Whether this ceiling or ratio is to be measured. Raises `InvalidSetting`."""
        return name in self.names

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Requests that decode together, case by case. Raises `InvalidSetting`."""
        return (1, 2) if self.quick else _numbers(self.batches, "--batches")

    @property
    def context_lens(self) -> tuple[int, ...]:
        """Tokens in front of the one that is decoded, case by case. Raises `InvalidSetting`."""
        return (32,) if self.quick else _numbers(self.contexts, "--contexts")

    @property
    def num_prompt_tokens(self) -> int:
        """Length of a prompt that is prefilled. Raises `InvalidSetting`."""
        if self.prompt_tokens < 1:
            raise InvalidSetting(f"--prompt-tokens {self.prompt_tokens} is not at least 1")
        return min(64, self.prompt_tokens) if self.quick else self.prompt_tokens


def _numbers(text: str, flag: str, lowest: int = 1) -> tuple[int, ...]:
    items = tuple(filter(None, (item.strip() for item in text.split(","))))
    if not items or not all(item.isdecimal() and int(item) >= lowest for item in items):
        raise InvalidSetting(f"{flag}: {text!r:.40} is not a list of numbers from {lowest} on")
    return tuple(int(item) for item in items)
