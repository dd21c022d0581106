"""How much faster quantized weights decode on a CPU: `python -m baton.bench.limits.quantized_step [--batch 1]
[--threads 1]`.

Engines with random weights of one shape, by default Qwen3-0.6B's, each quantized in another way while it is loaded,
decode in turns, two steps each. Printed is the time of a step and how often the plain weights' step has it: of the
fastest steps, which say most on a machine that others use, and of the middle ones with the range of the pairs. Memory
is what the process grew by when an engine was built.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from baton.bench.gpu_check.setup_process import write_model
from baton.bench.numbers import median
from baton.engine.build import Engine, build_engine
from baton.engine.models.quantization.while_loading import AUTO, WHILE_LOADING
from baton.engine.runner.kv_memory import allocate_private
from baton.engine.settings import EngineSettings
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams

_PROMPT = tuple(range(20, 52))
_STEPS_A_TURN, _WARM_UP_STEPS = 2, 5


def decoding(model: Path, method: str, flags: argparse.Namespace) -> Engine:
    """An engine that decodes `flags.batch` requests in each step from now on."""
    num_steps = _STEPS_A_TURN * flags.rounds + 2 * _WARM_UP_STEPS
    engine = build_engine(
        EngineSettings(
            model=str(model),
            load_format="dummy",
            quantization=method,
            num_threads=flags.threads,
            max_model_len=len(_PROMPT) + num_steps + 1,
            max_num_seqs=flags.batch,
            cpu_kernels=flags.cpu_kernels,
        ),
        allocate_private,
    )
    for number in range(flags.batch):
        params = DecodingParams(temperature=0.0, max_tokens=num_steps, ignore_eos=True)
        engine.core.add(RequestKey.numbered(number + 1), _PROMPT, params)
    while len(engine.core.step()) < flags.batch:
        continue
    for _ in range(_WARM_UP_STEPS):
        engine.core.step()
    return engine


def step_s(engine: Engine) -> float:
    """Seconds of a step, in one turn."""
    begun_s = time.perf_counter()
    for _ in range(_STEPS_A_TURN):
        engine.core.step()
    return (time.perf_counter() - begun_s) / _STEPS_A_TURN


def measure(model: Path, flags: argparse.Namespace) -> None:
    """Measure and print."""
    engines: dict[str, Engine] = {}
    grown_mib: dict[str, int] = {}
    process = psutil.Process()
    for method in WHILE_LOADING:
        before = process.memory_info().rss
        engines[method] = decoding(model, method, flags)
        grown_mib[method] = (process.memory_info().rss - before) >> 20
    times: dict[str, list[float]] = {method: [] for method in engines}
    for _ in range(flags.rounds):
        for method, engine in engines.items():
            times[method].append(step_s(engine))
    for engine in engines.values():
        engine.executor.close()
        engine.device.close()
    plain = times[AUTO]
    sys.stdout.write(f"batch {flags.batch}, threads {flags.threads}, {flags.rounds} rounds\n")
    for method, own in times.items():
        pairs = [before / after for before, after in zip(plain, own, strict=True)]
        name = "bfloat16" if method == AUTO else method
        sys.stdout.write(
            f"{name}: {1e3 * min(own):.2f} ms at least, half {1e3 * median(own):.2f}; "
            f"x{min(plain) / min(own):.2f} of least, x{median(plain) / median(own):.2f} of halves, "
            f"pairs {min(pairs):.2f} to {max(pairs):.2f}; {grown_mib[method]} MiB\n"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m baton.bench.limits.quantized_step", description=__doc__)
    parser.add_argument("--shape", choices=("0.6B", "8B", "tiny"), default="0.6B", help="of Qwen3, or a tiny model")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--cpu-kernels", default="auto", help="as of `baton serve`")
    flags = parser.parse_args(argv)
    with TemporaryDirectory() as folder:
        measure(write_model(Path(folder), flags.shape), flags)
    return 0


if __name__ == "__main__":
    sys.exit(main())
