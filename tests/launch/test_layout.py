"""How many nodes start where nobody has said it, and that nothing is chosen where somebody has."""

from __future__ import annotations

import pytest

from baton.launch.layout import ONE_NODE, SPLIT, Layout
from baton.launch.settings import resolve_serve

NO_GPU, ONE_GPU, TWO_GPUS, FOUR_GPUS = "", "0", "0,1", "0,1,2,3"


@pytest.mark.parametrize(
    ("words", "gpus", "expected"),
    [
        # nobody has said it: a device is not divided
        ("", NO_GPU, ONE_NODE),
        ("", ONE_GPU, ONE_NODE),
        ("", TWO_GPUS, SPLIT),
        ("--device=cuda", TWO_GPUS, SPLIT),
        ("--device=cpu", TWO_GPUS, ONE_NODE),
        ("--device=cuda:1", TWO_GPUS, ONE_NODE),
        ("--tensor-parallel-size=2", TWO_GPUS, ONE_NODE),
        ("--tensor-parallel-size=2", FOUR_GPUS, SPLIT),
        ("--goal-tpot-ms=25", NO_GPU, ONE_NODE),
        ("--goal-ttft-ms=500", NO_GPU, ONE_NODE),
        ("--goal-tpot-ms=25", TWO_GPUS, SPLIT),
        # somebody has, or has said how nodes of two kinds should be
        ("--prefill=0", TWO_GPUS, Layout(0, 1)),
        ("--prefill=1", NO_GPU, Layout(1, 1)),
        ("--prefill=2 --decode=3 --goal-tpot-ms=25", NO_GPU, Layout(2, 3)),
        ("--decode=1", NO_GPU, Layout(1, 1)),
        ("--decode=2 --goal-tpot-ms=25", NO_GPU, Layout(1, 2)),
        ("--mixed --goal-tpot-ms=25", NO_GPU, Layout(1, 1)),
        ("--data-parallel-size=2", NO_GPU, Layout(1, 1)),
        ("--prefill-tensor-parallel-size=2", NO_GPU, Layout(1, 1)),
        ("--decode-pipeline-parallel-size=2", NO_GPU, Layout(1, 1)),
    ],
)
def test_a_device_is_divided_only_where_somebody_asks_for_it(words: str, gpus: str, expected: Layout) -> None:
    assert resolve_serve(words.split(), {"CUDA_VISIBLE_DEVICES": gpus}).layout == expected


def test_a_count_of_the_environment_is_asked_for_too() -> None:
    assert resolve_serve([], {"CUDA_VISIBLE_DEVICES": "", "BATON_PREFILL": "1"}).layout == Layout(1, 1)
