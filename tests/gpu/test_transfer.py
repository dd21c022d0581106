"""Blocks that are handed over between two processes with pools on a device arrive byte by byte."""

from __future__ import annotations

import pytest

from baton.bench.gpu_check.command import TRANSPORTS
from baton.bench.gpu_check.relay_process import pair_on, why_not
from baton.bench.gpu_check.setup_process import block_bytes
from baton.device.base import Device
from tests.gpu.conftest import DEVICE, IS_GPU, IS_QUICK


@pytest.mark.parametrize("transport", TRANSPORTS[:1] if IS_QUICK else TRANSPORTS)
def test_blocks_arrive_byte_by_byte(transport: str, device: Device) -> None:
    if reason := why_not(transport, DEVICE):
        pytest.skip(reason)
    num_blocks = 64 if IS_GPU else 8
    with pair_on(transport, DEVICE, num_blocks, block_bytes("8B" if IS_GPU else "tiny")) as pair:
        for count in (1, num_blocks):
            pair.hand_over_verified(0, count)
