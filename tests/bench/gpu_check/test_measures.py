"""One measurement for real, on the host's cores with tiny sizes: the same code that runs on a GPU."""

from __future__ import annotations

import pytest
import torch

from baton.bench.gpu_check.command import MODELS, Group, GroupRun, all_groups
from baton.bench.gpu_check.measure_process import MEASUREMENTS, machine
from baton.bench.gpu_check.relay_process import rows_of_answers
from baton.bench.gpu_check.rows import Row, Verdict
from baton.bench.gpu_check.setup_process import Setup, busy_us, gb_per_s
from tests.bench.test_breakdown import asked, timings


def test_a_measurement_runs_without_a_gpu_and_its_speeds_mean_nothing() -> None:
    found = GroupRun(Group("prefill", "", 60.0, measures=MODELS[:1]), "cpu", quick=True).run(lambda _: None)
    assert [(row.name, row.verdict) for row in found.rows] == [
        ("matrix products", Verdict.MEANINGLESS),
        ("prefill", Verdict.MEANINGLESS),
    ]


def test_every_group_that_measures_something_has_a_measurement() -> None:
    assert {group.name for group in all_groups(quick=False) if group.measures} == set(MEASUREMENTS)


def test_a_machine_is_described_and_a_missing_device_is_one_sentence() -> None:
    assert machine(Setup("cpu", is_quick=True))["num_gpus"] == 0
    if not torch.cuda.is_available():
        assert machine(Setup("cuda", is_quick=True))["missing"].startswith("--device cuda")


def test_what_overlaps_counts_once() -> None:
    assert busy_us([(0, 10), (5, 12), (20, 25), (21, 22)]) == 17
    assert gb_per_s(10**9, 1000.0) == pytest.approx(1.0)


def test_the_exposed_transfer_is_a_share_of_the_time_to_the_first_token() -> None:
    def rows(later_us: int) -> list[Row]:
        """Of answers whose KV was ready so much later than 1.5 ms after token 1, which came after 39.5 ms."""
        moved = ("kv_ready_us", "decode_begun_us", "second_sampled_us", "second_written_us")
        outcome = asked(stamps=timings(**{name: timings()[name] + later_us for name in moved}))
        outcome.chunk_s[1:] = [came_s + later_us / 1e6 for came_s in outcome.chunk_s[1:]]
        outcome.usage["kv_transfer"] = {"bytes": 4000, "transfer_ms": 2.0}
        return rows_of_answers("case", [outcome] * 3)

    first, _, exposed = rows(0)
    assert (first.value, exposed.value) == pytest.approx((39.5, 100 * 1.5 / 39.5))
    assert (exposed.verdict, rows(1000)[2].verdict) == (Verdict.OK, Verdict.BELOW)
