"""Recorded decode steps against eager ones: the same tokens, and the times of both.

Owns the requests. A batch shrinks by one request at a time from its largest size to one, so every bucket of recorded
steps is replayed, with and without padding. A token that differs is wrong unless the eager model was undecided: kernels
of other sizes round differently, and where two tokens are equally likely rounding decides.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.gpu_check.checkpoints import VOCAB_SIZE, write_checkpoint
from bench.gpu_check.parts_process import NoiseEngines, Setup, build
from bench.gpu_check.rows import Row, count_row, figure_row
from bench.gpu_check.steps_process import EngineSteps
from bench.stats import median
from engine.build import Engine
from engine.scheduler.request import SampledToken
from wire.request_key import RequestKey
from wire.sampling import DecodingParams

UNDECIDED = 0.1
"""Natural logarithm of the ratio of two probabilities below which rounding may decide, in bfloat16."""
_MAX_SEQS = 40
_FEWEST_TOKENS = 3


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Requests whose tokens differ: `num_wrong` where the eager model was decided, `num_undecided` where it was not."""

    num_wrong: int
    num_undecided: int


def make_requests(count: int, seed: int = 0) -> list[tuple[list[int], DecodingParams]]:
    """(prompt, parameters): each one token longer than the one before, so that the batch shrinks one by one."""
    chance = random.Random(seed)
    made = []
    for index in range(count):
        prompt = chance.choices(range(VOCAB_SIZE - 8), k=chance.randint(1, 90))
        made.append(
            (prompt, DecodingParams(temperature=0.0, max_tokens=_FEWEST_TOKENS + index, ignore_eos=True, logprobs=2))
        )
    return made


def generate(engine: Engine, requests: Sequence[tuple[list[int], DecodingParams]]) -> list[list[SampledToken]]:
    """The tokens of each request, all of them together in one batch."""
    core = engine.core
    keys = [RequestKey.numbered(index) for index in range(len(requests))]
    found: dict[RequestKey, list[SampledToken]] = {key: [] for key in keys}
    for key, (prompt, params) in zip(keys, requests, strict=True):
        core.add(key, prompt, params)
    while core.has_work:
        for output in core.step():
            if output.token is not None:
                found[output.key].append(output.token)
    core.check()
    return list(found.values())


def compare(eager: Sequence[Sequence[SampledToken]], recorded: Sequence[Sequence[SampledToken]]) -> Disagreement:
    """Request by request, up to the first token that differs."""
    num_wrong = num_undecided = 0
    for ours, theirs in zip(eager, recorded, strict=True):
        if len(ours) != len(theirs):
            num_wrong += 1
            continue
        first = next((pair for pair in zip(ours, theirs, strict=True) if pair[0].token_id != pair[1].token_id), None)
        if first is not None:
            is_undecided = lead(first[0], first[1].token_id) < UNDECIDED
            num_undecided += is_undecided
            num_wrong += not is_undecided
    return Disagreement(num_wrong, num_undecided)


def lead(drawn: SampledToken, other: int) -> float:
    """How much likelier the drawn token was than `other`; infinite when that was not among the likeliest."""
    report = drawn.logprobs
    if report is None or other not in report.top_ids:
        return float("inf")
    return report.logprob - report.top_logprobs[report.top_ids.index(other)]


class GraphsBench:
    """See `Bench`."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._folder = tempfile.TemporaryDirectory(prefix="baton-gpu-check-")
        self._engines = NoiseEngines(setup)

    def check(self, name: str) -> list[Row]:
        """See `Bench.check`."""
        return self._tokens() if name == "tokens" else self._step_times()

    def close(self) -> None:
        """See `Bench.close`."""
        self._engines.close()
        self._folder.cleanup()

    def _tokens(self) -> list[Row]:
        rows = []
        for family in ("qwen3", "llama"):
            folder = write_checkpoint(Path(self._folder.name) / family, family)
            requests = make_requests(_MAX_SEQS if self._setup.is_gpu else 12)
            eager, recorded = (
                generate(self._engine(folder, enforce_eager=enforce_eager), requests) for enforce_eager in (True, False)
            )
            found = compare(eager, recorded)
            note = f"batches of {len(requests)} down to 1; {found.num_undecided} parted where two tokens were as likely"
            rows.append(count_row("recorded steps", f"{family}, bfloat16", found.num_wrong, len(requests), note=note))
        return rows

    def _engine(self, folder: Path, *, enforce_eager: bool) -> Engine:
        return build(
            self._setup,
            folder,
            dtype="bfloat16",
            num_blocks=1024,
            max_model_len=512,
            max_num_seqs=_MAX_SEQS,
            max_num_batched_tokens=256,
            enforce_eager=enforce_eager,
        )

    def _step_times(self) -> list[Row]:
        model, context = self._setup.model("0.6B"), 1024 if self._setup.is_gpu else 32
        num_tokens = context + 512
        rows, steps = [], {}
        for name, enforce_eager in (("eager", True), ("recorded", False)):
            engine = self._engines.build(
                model,
                max_model_len=num_tokens,
                num_blocks=2 + 8 * -(-num_tokens // 16),
                max_num_seqs=8,
                enforce_eager=enforce_eager,
            )
            steps[name] = EngineSteps(engine)
        for batch in (1, 8):
            taken: dict[str, list[float]] = {name: [] for name in steps}
            for _ in range(3):
                for name, each in steps.items():
                    taken[name].append(median(each.decode(batch, context, 20 if self._setup.is_gpu else 2).step_ms))
            case = f"{self._setup.label('0.6B')}, batch {batch}, context {context}"
            rows += [figure_row(f"decode step, {name}", case, median(taken[name]), "ms") for name in steps]
            ratio = median(taken["eager"]) / median(taken["recorded"])
            rows.append(figure_row("eager over recorded", case, ratio, "times"))
        return rows


def open_bench(setup: Setup) -> GraphsBench:
    """See `bench.gpu_check.worker_process`."""
    return GraphsBench(setup)
