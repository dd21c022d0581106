from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from baton.bench.limits.result import NAMES, LimitsSettings, last_cache_bytes
from baton.wire.errors import InvalidSetting

DEFAULT = LimitsSettings()


def test_everything_is_measured_unless_some_are_named() -> None:
    assert DEFAULT.names == NAMES
    some = LimitsSettings(only="attn_ratio, memcpy")
    assert some.names == ("memcpy", "attn_ratio")


def test_an_engine_gets_the_share_of_one_of_two_nodes() -> None:
    cores = sorted(os.sched_getaffinity(0))
    assert DEFAULT.core_ids == tuple(cores)
    assert DEFAULT.num_threads == max(1, len(cores) // 2)
    assert LimitsSettings(threads=3).num_threads == 3
    assert LimitsSettings(cores=str(cores[-1])).core_ids == (cores[-1],)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"only": "speed"}, "--only 'speed' is not one of memcpy, "),
        ({"cores": "4096"}, "--cores 4096 are not some of"),
        ({"batches": "1,x"}, "--batches: '1,x' is not a list of numbers from 1 on"),
        ({"contexts": "0"}, "--contexts: '0' is not a list of numbers from 1 on"),
    ],
)
def test_what_cannot_be_used_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidSetting, match=message):
        replace(DEFAULT, **change).check()  # type: ignore[arg-type]


def test_no_cache_holds_a_buffer(tmp_path: Path) -> None:
    for index, size in enumerate(("48K", "1024K", "65536K", "strange")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    assert last_cache_bytes(tmp_path) == 2**26
    assert last_cache_bytes(tmp_path / "nothing") == 0
    assert DEFAULT.buffer_bytes >= max(2**27, min(4 * last_cache_bytes(), 2**31))
    assert LimitsSettings(quick=True).buffer_bytes < 2**24
