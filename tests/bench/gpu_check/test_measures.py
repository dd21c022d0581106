"""One measurement for real, on the host's cores with tiny sizes: the same code that runs on a GPU."""

from __future__ import annotations

import torch

from baton.bench.gpu_check.command import MODELS, Group, GroupRun, all_groups
from baton.bench.gpu_check.measure_process import MEASUREMENTS, machine
from baton.bench.gpu_check.rows import Verdict
from baton.bench.gpu_check.setup_process import Setup


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
