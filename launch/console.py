"""What the supervisor shows on stderr: lines of its children, and how far the weights are.

Owns the terminal line of the progress bar. Does not know processes.
Invariants: lines of different threads never mix; a terminal that has gone away never stops the supervisor.
"""

from __future__ import annotations

import contextlib
import threading
from typing import NoReturn, TextIO

from tqdm import tqdm

BAR_DELAY_S = 0.5


class Console:
    """Writes to `stream` from any thread. Weights that load within `bar_delay_s` show no bar."""

    def __init__(self, stream: TextIO, bar_delay_s: float = BAR_DELAY_S) -> None:
        self._stream = stream
        self._bar_delay_s = bar_delay_s
        self._lock = threading.Lock()
        self._loaded: dict[str, tuple[int, int]] = {}
        self._bar: tqdm[NoReturn] | None = None

    def log(self, name: str, text: str) -> None:
        """One line, marked with the name of the process it is from."""
        with self._lock, contextlib.suppress(OSError):
            self._write(f"[{name}] {text}\n")

    def loading(self, name: str, done_bytes: int, total_bytes: int) -> None:
        """Weights of `name` read so far: one bar over all children on a terminal, else a line at both ends."""
        with self._lock, contextlib.suppress(OSError):
            is_first = name not in self._loaded
            was_complete = not is_first and self._loaded[name][0] >= self._loaded[name][1]
            self._loaded[name] = (done_bytes, total_bytes)
            if self._stream.isatty():
                self._show_bar()
            elif is_first and done_bytes < total_bytes:
                self._write(f"[{name}] loading {total_bytes / 1e6:.1f} MB of weights\n")
            elif not was_complete and done_bytes >= total_bytes:
                self._write(f"[{name}] loaded {total_bytes / 1e6:.1f} MB of weights\n")

    def close_bar(self) -> None:
        """Take the progress bar off the terminal."""
        with self._lock, contextlib.suppress(OSError):
            if self._bar is not None:
                self._bar.close()
            self._bar = None
            self._loaded.clear()

    def _show_bar(self) -> None:
        bar = self._open_bar() if self._bar is None else self._bar
        self._bar = bar
        bar.total = sum(total for _, total in self._loaded.values())
        bar.update(sum(done for done, _ in self._loaded.values()) - bar.n)

    def _open_bar(self) -> tqdm[NoReturn]:
        return tqdm(
            desc="loading weights",
            unit="B",
            unit_scale=True,
            file=self._stream,
            leave=False,
            delay=self._bar_delay_s,
            mininterval=0,  # children report a few times a second
        )

    def _write(self, text: str) -> None:
        if self._bar is not None:
            self._bar.clear()
        self._stream.write(text)
        self._stream.flush()
