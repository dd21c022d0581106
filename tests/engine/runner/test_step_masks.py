"""Masks of a step are made beside it, are those that would be made at once, and leave matchers at rest."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from device.emulated import EmulatedDevice
from device.host import HostDevice
from engine.runner.grammar_masks import GrammarRow, stack_masks
from engine.runner.sampling_plan import MASK_BYTES
from engine.runner.step_masks import MasksBehindLaunch, MasksBeside, StepMasks, step_masks
from tests.engine.runner.test_grammar_masks import Fixed

VOCAB_SIZE = 40


class OnThread(Fixed):
    """Notes which thread asks it."""

    def mask(self) -> bytes | None:
        self.reason = threading.current_thread().name
        return super().mask()


class Broken(Fixed):
    """Fails in a way that no matcher may."""

    def mask(self) -> bytes | None:
        raise MemoryError("no room for a mask")


def rows_of(*masks: Fixed) -> list[GrammarRow]:
    return [GrammarRow(2 * row, mask) for row, mask in enumerate(masks)]


def makers() -> list[StepMasks]:
    staging = EmulatedDevice().staging(MASK_BYTES)
    staging.begin()
    return [MasksBeside(VOCAB_SIZE), MasksBehindLaunch(VOCAB_SIZE, staging)]


def test_masks_are_those_that_are_stacked_at_once() -> None:
    for maker in makers():
        for number in (1, 3, 2):
            rows = rows_of(*(Fixed(bytes([number, row, 7, 9, row])) for row in range(number)))
            expected = stack_masks(rows, VOCAB_SIZE)
            maker.begin(rows)
            masks = maker.finish()
            assert masks is not None
            assert masks.num_rows == number
            assert torch.equal(masks.bits, expected.bits)
            assert (masks.rows is None) == (expected.rows is None)
            maker.begin(())
            assert maker.finish() is None


def test_a_host_makes_them_on_another_thread_and_a_device_where_it_is_driven() -> None:
    for device, is_beside in ((HostDevice(), True), (EmulatedDevice(), False)):
        staging = device.staging(MASK_BYTES)
        staging.begin()
        maker, matcher = step_masks(device, VOCAB_SIZE, staging, num_spare_cores=2), OnThread(b"\xff" * 5)
        maker.begin(rows_of(matcher))
        maker.finish()
        assert (matcher.reason != threading.current_thread().name) == is_beside
    busy = step_masks(HostDevice(), VOCAB_SIZE, HostDevice().staging(MASK_BYTES), num_spare_cores=1)
    assert isinstance(busy, MasksBehindLaunch)


def test_an_error_reaches_the_step_and_the_next_one_is_made() -> None:
    for maker in makers():
        maker.begin(rows_of(Fixed(b"\xff"), Broken(None)))
        with pytest.raises(MemoryError):
            maker.finish()
        maker.begin(rows_of(Fixed(b"\x01")))
        masks = maker.finish()
        assert masks is not None
        assert masks.bits.tolist() == [1, 0, 0, 0, 0]


def test_the_thread_ends_with_its_owner() -> None:
    maker, matcher = MasksBeside(VOCAB_SIZE), OnThread(b"\xff")
    maker.begin(rows_of(matcher))
    maker.finish()
    threads = [thread for thread in threading.enumerate() if thread.name == matcher.reason]
    del maker
    gc.collect()
    for thread in threads[-1:]:
        thread.join(timeout=10)
        assert not thread.is_alive()
