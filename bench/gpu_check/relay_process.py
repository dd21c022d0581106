"""Rates of KV handoffs between two processes with pools in device memory, and what a client still sees of them.

Owns which sizes are moved. `transfer_rows` uses the nodes of `baton bench kv`, `exposed_rows` asks a whole relay.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import torch

from baton.bench.breakdown import TTST_PARTS, breakdown_of
from baton.bench.client.outcome import Outcome
from baton.bench.gpu_check.rows import Row, missing_row, speed_row
from baton.bench.gpu_check.setup_process import BLOCK_SIZE, Setup, block_bytes, config_of, gb_per_s, write_model
from baton.bench.kv.measure import NodePair, node_pair
from baton.bench.numbers import median
from baton.bench.serve.command import run_serve_benchmark
from baton.bench.serve.settings import ServeBenchSettings
from baton.bench.targets.process import RunningTarget
from baton.bench.targets.spec import Target
from baton.bench.workload.dataset_settings import DatasetSettings
from baton.kvtransfer.integrity import DOT64, XXH3
from baton.wire.errors import RequestFailed

_MOST_PERCENT = 5.0
_ONE_BY_ONE = ServeBenchSettings(max_concurrency=1, num_warmups=1, ignore_eos=True, temperature=0, disable_tqdm=True)
_READY_S, _PATIENCE_S = 90.0, 8.0


def why_not(transport: str, device: str) -> str:
    """Why this machine cannot carry KV that way; "" when it can."""
    if transport == "nixl" and importlib.util.find_spec("nixl") is None:
        return "nixl is not installed: pip install 'baton-serve[nixl]'"
    if transport == "nccl" and device == "cuda" and torch.cuda.device_count() < 2:
        return "nccl needs a GPU for each node, and there is one"
    return ""


def pair_on(transport: str, device: str, num_blocks: int, num_bytes: int) -> AbstractContextManager[NodePair]:
    """Two nodes with pools on the device; where no GPU is, staged transports see the host's memory as a device's."""
    place = device if device == "cuda" or transport != "nixl" else ""
    return node_pair(transport, DOT64 if place else XXH3, num_blocks, num_bytes, device=place)


def transfer_rows(setup: Setup, transport: str) -> Iterator[Row]:
    """Handoffs of blocks of an 8B model, in turns with a copy of as many bytes."""
    if reason := why_not(transport, setup.device):
        yield missing_row("handoff", transport, reason)
        return
    size, counts, num_rounds = block_bytes(setup.model("8B")), (8, 64, 512), 7
    if not setup.is_gpu:
        counts, num_rounds = (2, 4, 8), 2
    with pair_on(transport, setup.device, max(counts), size) as pair:
        pair.hand_over(0, max(counts))
        for count in counts:
            copies_s, walls_s = [], []
            for index in range(num_rounds):
                first = index * count % (max(counts) - count + 1)
                copies_s.append(pair.copy(first, count))
                walls_s.append(pair.hand_over(first, count)[0])
            case = f"{transport}, {count} blocks of {size / 2**20:.3g} MiB"
            wall_ms, copy_ms = median(walls_s) * 1e3, median(copies_s) * 1e3
            note = f"{wall_ms:.3g} ms; a copy in the same memory {copy_ms:.3g} ms"
            ceiling = gb_per_s(count * size, copy_ms)
            yield speed_row("handoff", case, gb_per_s(count * size, wall_ms), "GB/s", note, bound=ceiling)
            yield speed_row("handoff, beyond a copy", case, (wall_ms - copy_ms) * 1e3, "us")


def exposed_rows(setup: Setup, _: str) -> Iterator[Row]:
    """What is left of the handoff of a long prompt when the prompt is computed, one prompt after the other."""
    num_tokens, num_rounds = (8192, 7) if setup.is_gpu else (96, 2)
    model = setup.model("8B")
    flags = ["--prefill=1", "--load-format=dummy", "--max-model-len", str(num_tokens + 64), "--max-num-seqs=4"]
    flags += ["--num-blocks", str(4 * -(-(num_tokens + 64) // BLOCK_SIZE)), "--local-prefill-tokens", "0"]
    with tempfile.TemporaryDirectory(prefix="baton-gpu-check-") as folder:
        served = ("baton", "serve", str(write_model(Path(folder), model)), "--device", setup.device, *flags)
        target, asked = Target("baton", "", served), DatasetSettings(num_prompts=num_rounds, random_output_len=4)
        with RunningTarget(target, _READY_S, say=lambda _: None, patience_s=_PATIENCE_S) as running:
            there = replace(_ONE_BY_ONE, base_url=(running.url,), vocab_size=config_of(model)["vocab_size"])
            found = run_serve_benchmark(there, replace(asked, random_input_len=num_tokens), say=lambda _: None)
    yield from rows_of_answers(f"{setup.label('8B')}, {num_tokens} tokens", found.outcomes)


def rows_of_answers(case: str, outcomes: Sequence[Outcome]) -> list[Row]:
    """Medians over answers. Raises `RequestFailed` when one came without its stamps or without a handoff."""
    ttft_ms, exposed_ms, rates = [], [], []
    for outcome in outcomes:
        found = breakdown_of(outcome)
        transfer = outcome.usage.get("kv_transfer")
        if found is None or found.ttst is None or not isinstance(transfer, dict):
            raise RequestFailed(outcome.message or "an answer came without the stamps of a handoff")
        ttft_ms.append(found.ttft.measured_ms)
        exposed_ms.append(found.ttst.parts_ms[TTST_PARTS.index("exposed_transfer")])
        rates.append(transfer["bytes"] / max(transfer["transfer_ms"], 1e-3) / 1e6)
    percent = median([100 * exposed / ttft for exposed, ttft in zip(exposed_ms, ttft_ms, strict=True)])
    note = f"{median(exposed_ms):.3g} ms of {median(ttft_ms):.4g} ms"
    return [
        speed_row("time to the first token", case, median(ttft_ms), "ms"),
        speed_row("bytes over grant to delivery", case, median(rates), "GB/s", "computing the prompt included"),
        speed_row("exposed transfer over TTFT", case, percent, "%", note, target=_MOST_PERCENT),
    ]
