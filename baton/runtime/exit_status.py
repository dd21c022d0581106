"""How every program of Baton ends: with a status, and after an error with one line on stderr.

    0    it did what it was asked to, or stopped as it was asked to
    1    it failed while it ran: a request, a child, a peer, a target that was missed
    2    what it was asked for cannot be: a flag, a variable, a file, a checkpoint; the same again ends the same
    130  Ctrl-C, where it has no orderly stop of its own

Owns the rule which error is which. Imports nothing heavy: `baton --help` needs it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from baton.wire.errors import BatonError, InvalidSetting, ModelLoadError

FAILED_STATUS, USAGE_STATUS, INTERRUPTED_STATUS = 1, 2, 130


def report_errors(run: Callable[[], int | None]) -> int:
    """Run a program's body; its exit status. A `BatonError` is one line on stderr."""
    try:
        return run() or 0
    except BatonError as error:
        sys.stderr.write(f"error: {error}\n")
        return USAGE_STATUS if isinstance(error, InvalidSetting | ModelLoadError) else FAILED_STATUS
    except KeyboardInterrupt:
        return INTERRUPTED_STATUS
