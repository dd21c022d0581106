"""What is left of the handoff of a long prompt when the prompt is computed, as a share of the time to the first token.

Owns one relay with random weights, asked one prompt after the other. The parts of each answer are those that
`usage.timings` gives by one clock (`bench.breakdown`): `exposed_transfer` is the time from the first token drawn until
the KV is on the decode node and verified.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from bench.breakdown import TTST_PARTS, breakdown_of
from bench.client.asking import TIMEOUT_S, Prompts, ask, client_runner
from bench.client.endpoint import probe
from bench.client.outcome import Outcome
from bench.gpu_check.checkpoints import write_config
from bench.gpu_check.parts_process import Setup
from bench.gpu_check.rows import Row, figure_row, limit_row
from bench.gpu_check.served_process import Relay
from bench.gpu_check.shapes import config_of
from bench.stats import median
from wire.errors import RequestFailed

_NUM_TOKENS, _SMALL_TOKENS = 8192, 96
_MOST_PERCENT = 5.0
_NUM_ROUNDS = 7
_NUM_OUTPUT_TOKENS = 4
_READY_S = 90.0


class ExposedBench:
    """See `Bench`."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._folder = tempfile.TemporaryDirectory(prefix="baton-gpu-check-")

    def check(self, name: str) -> list[Row]:
        """See `Bench.check`."""
        num_tokens = _NUM_TOKENS if self._setup.is_gpu else _SMALL_TOKENS
        config = config_of(self._setup.model("8B"))
        folder = write_config(Path(self._folder.name) / "model", config)
        flags: tuple[str, ...] = ("--load-format", "dummy", "--max-model-len", str(num_tokens + 64))
        num_blocks = 4 * -(-(num_tokens + 64) // 16)
        flags += ("--num-blocks", str(num_blocks), "--max-num-seqs", "4")
        with (
            Relay(folder, "cuda" if self._setup.is_gpu else "cpu", *flags, ready_s=_READY_S) as relay,
            client_runner() as runner,
        ):
            endpoint = runner.run(probe(relay.url, "completions", "", TIMEOUT_S))
            prompts = Prompts(config["vocab_size"] - 8, 0)
            outcomes = [
                runner.run(ask(endpoint, prompts.conversation(num_tokens, _NUM_OUTPUT_TOKENS)))
                for _ in range(1 + (_NUM_ROUNDS if self._setup.is_gpu else 2))
            ]
        return exposed_rows(f"{self._setup.label('8B')}, {num_tokens} tokens", outcomes[1:])

    def close(self) -> None:
        """See `Bench.close`."""
        self._folder.cleanup()


def exposed_rows(case: str, outcomes: list[Outcome]) -> list[Row]:
    """Medians over answers. Raises `RequestFailed` when one came without its stamps or without a handoff."""
    ttft_ms, exposed_ms, rates = [], [], []
    for outcome in outcomes:
        found = breakdown_of(outcome)
        transfer = outcome.usage.get("kv_transfer")
        if found is None or found.ttst is None or not isinstance(transfer, dict):
            raise RequestFailed("an answer came without the stamps of a handoff")
        ttft_ms.append(found.ttft.measured_ms)
        exposed_ms.append(found.ttst.parts_ms[TTST_PARTS.index("exposed_transfer")])
        rates.append(transfer["bytes"] / max(transfer["transfer_ms"], 1e-3) / 1e6)
    percent = median([100 * exposed / ttft for exposed, ttft in zip(exposed_ms, ttft_ms, strict=True)])
    note = f"{median(exposed_ms):.3g} ms of {median(ttft_ms):.4g} ms"
    return [
        figure_row("time to the first token", case, median(ttft_ms), "ms"),
        figure_row("bytes over grant to delivery", case, median(rates), "GB/s", "computing the prompt included"),
        limit_row("exposed transfer over TTFT", case, percent, "%", _MOST_PERCENT, note),
    ]


def open_bench(setup: Setup) -> ExposedBench:
    """See `bench.gpu_check.worker_process`."""
    return ExposedBench(setup)
