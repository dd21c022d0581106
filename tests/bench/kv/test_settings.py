from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec

import pytest

from baton.bench.kv.measure import KvBenchSettings, plan
from baton.wire.errors import InvalidSetting


@pytest.fixture
def without_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == "nixl" else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find)


@pytest.mark.usefixtures("without_nixl")
def test_a_missing_library_is_named_where_everything_was_asked_for() -> None:
    planned = plan(KvBenchSettings())
    assert "nixl" not in planned.transports
    assert planned.missing == {"nixl": "nixl is not installed: pip install 'baton-serve[nixl]'"}


@pytest.mark.usefixtures("without_nixl")
def test_a_missing_library_is_an_error_where_it_was_asked_for_by_name() -> None:
    with pytest.raises(InvalidSetting, match="--transports nixl: nixl is not installed"):
        plan(KvBenchSettings(transports="shm,nixl"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (KvBenchSettings(transports="smoke"), "--transports 'smoke' is not one of shm, zmq, nixl"),
        (KvBenchSettings(transports=","), "--transports names nothing"),
        (KvBenchSettings(blocks="1,0"), "--blocks: '1,0' is not a list of numbers from 1 on"),
        (KvBenchSettings(block_bytes=100), "--block-bytes 100 is not a multiple of 64"),
        (KvBenchSettings(checksum="md5"), "--checksum 'md5' is not one of xxh3, dot64, none"),
    ],
)
def test_what_cannot_be_measured_is_named(settings: KvBenchSettings, message: str) -> None:
    with pytest.raises(InvalidSetting, match=message):
        plan(settings)
