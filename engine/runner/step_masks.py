"""When the masks of a step's grammars are made: while the device computes the step.

Owns the thread for that, where the caller's own thread computes the step, and the way of masks to a device. Between
`begin` and `finish` nobody else may ask the matchers of the step's rows anything.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import Protocol

from device.base import STEP_TIMEOUT_S, Device, DeviceFailed, Staging
from engine.runner.grammar_masks import GrammarRow, Masks, stack_masks
from engine.runner.sampling_plan import MASK_BYTES, StagingRoom


class StepMasks(Protocol):
    """Makes the masks of one step after the other."""

    def begin(self, rows: Sequence[GrammarRow]) -> None:
        """Called before the step is computed, or launched on a device."""
        ...

    def finish(self) -> Masks | None:
        """The masks, before the step is sampled; None without rows. To be called after every `begin`."""
        ...


class MasksBehindLaunch:
    """See `StepMasks`. Made by the caller when the step is on its way, and sent after it."""

    def __init__(self, vocab_size: int, staging: Staging) -> None:
        self._vocab_size = vocab_size
        self._staging = staging
        self._rows: Sequence[GrammarRow] = ()

    def begin(self, rows: Sequence[GrammarRow]) -> None:
        """See `StepMasks.begin`."""
        self._rows = rows

    def finish(self) -> Masks | None:
        """See `StepMasks.finish`."""
        if not self._rows:
            return None
        masks = stack_masks(self._rows, self._vocab_size).staged(StagingRoom(self._staging, MASK_BYTES).put)
        # the copy repeats what the step was sent, in the order of the stream: nothing reads it meanwhile
        self._staging.upload()
        return masks


class MasksBeside:
    """See `StepMasks`. Made by a thread, while the caller computes the step without Python's lock."""

    def __init__(self, vocab_size: int) -> None:
        self._jobs: SimpleQueue[Sequence[GrammarRow] | None] = SimpleQueue()
        self._made: SimpleQueue[Masks | Exception] = SimpleQueue()
        self._vocab_size = vocab_size
        self._thread: threading.Thread | None = None
        self._is_making = False
        weakref.finalize(self, self._jobs.put, None)

    def begin(self, rows: Sequence[GrammarRow]) -> None:
        """See `StepMasks.begin`."""
        if not rows:
            return
        if self._thread is None:
            arguments = (self._jobs, self._made, self._vocab_size)
            self._thread = threading.Thread(target=_make, args=arguments, name="masks", daemon=True)
            self._thread.start()
        self._is_making = True
        self._jobs.put(rows)

    def finish(self) -> Masks | None:
        """See `StepMasks.finish`. Raises `DeviceFailed` when the thread does not answer."""
        if not self._is_making:
            return None
        self._is_making = False
        try:
            made = self._made.get(timeout=STEP_TIMEOUT_S)
        except Empty:
            raise DeviceFailed("the masks of a step were not made in time") from None
        if isinstance(made, Exception):
            raise made
        return made


MIN_SPARE_CORES = 2
"""With one, everything else that runs on the machine is in the thread's way, and then a step waits for it."""


def step_masks(device: Device, vocab_size: int, staging: Staging, num_spare_cores: int) -> StepMasks:
    """The kind that suits `device`, and a process that may use so many cores beside those of its compute threads;
    `staging` is that of its steps."""
    if device.is_asynchronous or num_spare_cores < MIN_SPARE_CORES:
        return MasksBehindLaunch(vocab_size, staging)
    return MasksBeside(vocab_size)


def _make(
    jobs: SimpleQueue[Sequence[GrammarRow] | None], made: SimpleQueue[Masks | Exception], vocab_size: int
) -> None:
    """The work of the thread, which knows no owner, so that it ends with it."""
    while (rows := jobs.get()) is not None:
        try:
            made.put(stack_masks(rows, vocab_size))
        except Exception as error:  # the outer edge of a thread: the step fails with it
            made.put(error)
