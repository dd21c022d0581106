"""How close an engine comes to the machine: `decode_bw_ratio`, `attn_ratio` and `prefill_flop_ratio`.

Owns which cases are measured and what is divided by what. Every value is a rate of the engine over a rate of the
machine, measured in turns in one process; numerators are what a step cannot avoid (`bench.limits.model_shapes`), so
whatever else the engine does makes its ratio smaller.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.child import Child
from bench.limits.ceilings import Ceilings, buffer_bytes, last_cache_bytes
from bench.limits.model_shapes import ModelShapes
from bench.limits.result import Ceiling, Ratio, ratio_of
from bench.limits.settings import ENGINE_NAMES, LimitsSettings
from bench.limits.turns import in_turns
from bench.stats import median

_MODULE = "bench.limits.engine_process"
_START_S = 300.0
_NUM_STEPS = 8
_MIN_SEQS = 64
_SPARE_TOKENS = 48
"""What a request may use of the pool beyond its context: the steps of a round, and blocks that are not full."""
_ATTEND_BYTES = 2**25
_TIMES_CACHE = 4


def engine_limits(settings: LimitsSettings, say: Callable[[str], None]) -> tuple[list[Ceiling], list[Ratio]]:
    """Build an engine in a process of its own and measure what `settings` wants of it; `say` hears what is going on.

    Raises `RequestFailed` when the engine cannot be built or a step fails.
    """
    if not any(map(settings.wants, ENGINE_NAMES)):
        return [], []
    say("building the engine")
    with Child(_MODULE, _spec(settings)) as child:
        child.hear(_START_S)
        shapes = _shapes(child.ask("describe")["shapes"])
        measurement = EngineMeasurement(child, settings, shapes, say)
        ratios = measurement.ratios()
        return measurement.ceilings(), ratios


def _spec(settings: LimitsSettings) -> dict[str, Any]:
    """See `EngineSpec`. The engine gets the cores of the first node."""
    num_tokens = max(settings.batch_sizes) * (max(settings.context_lens) + _SPARE_TOKENS)
    return {
        "model": settings.model,
        "cores": list(settings.core_ids[: settings.num_threads]),
        "num_threads": settings.num_threads,
        "max_num_seqs": max(_MIN_SEQS, *settings.batch_sizes),
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "num_pool_tokens": max(num_tokens, settings.num_prompt_tokens + _SPARE_TOKENS),
        "num_product_rows": _chunk(settings),
        "buffer_bytes": buffer_bytes(is_quick=settings.quick),
    }


def _chunk(settings: LimitsSettings) -> int:
    return min(settings.num_prompt_tokens, settings.max_num_batched_tokens)


def _shapes(described: dict[str, Any]) -> ModelShapes:
    return ModelShapes(**{**described, "windows": tuple(described["windows"])})


@dataclass(frozen=True, slots=True)
class _Case:
    """A decode step."""

    batch: int
    context: int

    def __str__(self) -> str:
        return f"batch {self.batch}, context {self.context}"


class EngineMeasurement:
    """One engine, its ceilings, and the cases that `settings` ask for."""

    def __init__(self, child: Child, settings: LimitsSettings, shapes: ModelShapes, say: Callable[[str], None]) -> None:
        self._child = child
        self._settings = settings
        self._shapes = shapes
        self._say = say
        products = shapes.prefill_products(_chunk(settings))
        size = buffer_bytes(is_quick=settings.quick)
        self._ceilings = Ceilings(child, size, settings.num_threads, products)
        self._num_steps = 2 if settings.quick else _NUM_STEPS

    def ratios(self) -> list[Ratio]:
        """Those that are wanted, case by case."""
        settings, found = self._settings, []
        cases = [_Case(batch, context) for context in settings.context_lens for batch in settings.batch_sizes]
        if settings.wants("decode_bw_ratio"):
            found += [self._decode(case) for case in cases]
        if settings.wants("attn_ratio"):
            found += [self._attention(case) for case in cases]
        if settings.wants("prefill_flop_ratio"):
            found.append(self._prefill(settings.num_prompt_tokens))
        return found

    def ceilings(self) -> list[Ceiling]:
        """Those that the ratios needed, and those that are wanted for themselves."""
        rates = {
            "memcpy": self._ceilings.copy_gb_per_s,
            "read_stream": self._ceilings.read_gb_per_s,
            "gemm": self._ceilings.gemm_gflop_per_s,
        }
        known = {ceiling.name for ceiling in self._ceilings.found()}
        for name, rate in rates.items():
            if self._settings.wants(name) and name not in known:
                self._say(name)
                self._ceilings.keep(name, [rate() for _ in range(1 + self._settings.num_rounds)][1:])
        return self._ceilings.found()

    def _decode(self, case: _Case) -> Ratio:
        taken_s: list[float] = []
        step_bytes = self._shapes.decode_bytes([case.context + 1] * case.batch)

        def gb_per_s() -> float:
            answer = self._child.ask("decode", batch=case.batch, context=case.context, num_steps=self._num_steps)
            taken_s.append(answer["taken_s"] / self._num_steps)
            return sum(map(self._shapes.decode_bytes, answer["context_lens"])) / float(answer["taken_s"]) / 1e9

        def note() -> str:
            return f"{step_bytes / 1e6:.1f} MB in {median(taken_s[1:]) * 1e3:.2f} ms a step{_in_cache(step_bytes)}"

        return self._against_reading("decode_bw_ratio", str(case), gb_per_s, note)

    def _attention(self, case: _Case) -> Ratio:
        num_bytes = case.batch * self._shapes.kv_read_bytes(case.context)
        num_calls = 1 if self._settings.quick else max(1, _ATTEND_BYTES // num_bytes)
        taken_s: list[float] = []

        def gb_per_s() -> float:
            answer = self._child.ask("attend", batch=case.batch, context=case.context, num_calls=num_calls)
            taken_s.append(float(answer) / num_calls)
            return num_bytes / taken_s[-1] / 1e9

        def note() -> str:
            return f"{num_bytes / 1e6:.1f} MB in {median(taken_s[1:]) * 1e3:.2f} ms, all layers"

        return self._against_reading("attn_ratio", str(case), gb_per_s, note)

    def _against_reading(self, name: str, case: str, subject: Callable[[], float], note: Callable[[], str]) -> Ratio:
        self._say(f"{name}, {case}")
        turns = in_turns(self._settings.num_rounds, self._ceilings.read_gb_per_s, subject)
        self._ceilings.keep("read_stream", turns.ceiling)
        return ratio_of(name, case, turns.subject, turns.ceiling, goal="1", note=note())

    def _prefill(self, num_tokens: int) -> Ratio:
        case = f"{num_tokens} tokens, chunks of {_chunk(self._settings)}"
        self._say(f"prefill_flop_ratio, {case}")
        flop = self._shapes.prefill_flop(num_tokens)

        def gflop_per_s() -> float:
            return flop / float(self._child.ask("prefill", num_tokens=num_tokens)["taken_s"]) / 1e9

        turns = in_turns(self._settings.num_rounds, self._ceilings.gemm_gflop_per_s, gflop_per_s)
        self._ceilings.keep("gemm", turns.ceiling)
        rate = median(turns.subject)
        note = f"{flop / 1e9:.1f} GFLOP in {flop / rate / 1e6:.1f} ms, {rate:.0f} GFLOP/s"
        return ratio_of("prefill_flop_ratio", case, turns.subject, turns.ceiling, goal="1", note=note)


def _in_cache(num_bytes: int) -> str:
    """What to say of a step whose bytes a cache may keep until the next step."""
    return ", in part from caches" if num_bytes < _TIMES_CACHE * last_cache_bytes() else ""
