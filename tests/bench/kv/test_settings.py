from __future__ import annotations

import pytest

from baton.bench.kv.measure import KvBenchSettings, plan
from baton.wire.errors import InvalidSetting


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
