"""`kv_bw_ratio` and `kv_overhead_us`: what `baton bench kv` measures of the transport that one machine's nodes take.

Owns the choice of the cases and the shape of their figures; `bench.kv` measures.
"""

from __future__ import annotations

from collections.abc import Callable

from bench.kv.measure import Case, measure
from bench.kv.report import figures
from bench.kv.settings import KvBenchSettings, plan
from bench.limits.difference import difference_of
from bench.limits.result import Ratio
from kvtransfer.integrity import XXH3
from kvtransfer.transports.registry import SHM
from wire.errors import RequestFailed


def kv_cases(num_rounds: int, cores: str, say: Callable[[str], None], *, quick: bool) -> list[Case]:
    """Measured handoffs of 1, 8, 64 and 512 blocks by shared memory with checksums. Raises `RequestFailed`."""
    settings = KvBenchSettings(transports=SHM, checksum=XXH3, rounds=num_rounds, cores=cores, quick=quick)
    results = measure(plan(settings), say)
    for transport, reason in results.failures.items():
        raise RequestFailed(f"{transport}: {reason}")
    return results.cases


def kv_ratios(case: Case) -> list[Ratio]:
    """Both figures of one size."""
    shown = f"{case.num_blocks} block{'s' * (case.num_blocks > 1)} of {case.block_bytes // 1024} KiB"
    note = f"{case.transport}, checksum {case.checksum}"
    found = figures(case)
    rate = Ratio(
        name="kv_bw_ratio",
        case=shown,
        value=found.kv_bw_ratio.of_medians,
        low=found.kv_bw_ratio.low,
        high=found.kv_bw_ratio.high,
        goal="1",
        noisy=found.is_noisy,
        note=f"{note}, {found.gb_per_s:.2f} of {found.memcpy_gb_per_s:.2f} GB/s",
    )
    wall_us, copy_us = ([taken_s * 1e6 for taken_s in all_s] for all_s in (case.wall_s, case.memcpy_s))
    return [rate, difference_of("kv_overhead_us", shown, wall_us, copy_us, unit="us", note=note)]
