"""The supervisor's output on stderr: the lines of its children, and the progress of their start.

Owns the terminal lines of the progress bars, one for each stage of the start. Does not know processes.
Invariants: lines of different threads never mix; a terminal that has gone away never stops the supervisor.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any, NoReturn, TextIO

from tqdm import tqdm

from baton.runtime.events import GRAPHS, WEIGHTS

BAR_DELAY_S = 0.5
_STARTS = {WEIGHTS: "loading {} of weights", GRAPHS: "recording {} CUDA graphs"}
_ENDS = {WEIGHTS: "loaded {} of weights", GRAPHS: "recorded {} CUDA graphs"}
_BARS: dict[str, dict[str, Any]] = {
    WEIGHTS: {"desc": "loading weights", "unit": "B", "unit_scale": True},
    GRAPHS: {"desc": "recording CUDA graphs", "unit": "graph"},
}


class Console:
    """Writes to `stream` from any thread. A stage that ends within `bar_delay_s` shows no bar; `line_interval_s` is the
    least time between lines about the progress of one child, where the stream is no terminal."""

    def __init__(self, stream: TextIO, bar_delay_s: float = BAR_DELAY_S, line_interval_s: float = 5.0) -> None:
        self._stream = stream
        self._bar_delay_s = bar_delay_s
        self._line_interval_s = line_interval_s
        self._lock = threading.Lock()
        self._stages: dict[str, _Stage] = {}

    def log(self, name: str, text: str) -> None:
        """Write one line, marked with the name of the process it is from."""
        with self._lock, contextlib.suppress(OSError):
            self._write(f"[{name}] {text}\n")

    def loading(self, name: str, done: int, total: int, stage: str = WEIGHTS) -> None:
        """Show the progress of `name` in a stage: one bar over all children on a terminal, else a line at begin, every
        few seconds and at the end."""
        with self._lock, contextlib.suppress(OSError):
            shown = self._stages.setdefault(stage, _Stage(stage))
            is_first = name not in shown.progress
            was_complete = not is_first and shown.is_complete(name)
            shown.progress[name] = (done, total)
            if self._stream.isatty():
                shown.show(self._stream, self._bar_delay_s)
            elif is_first and done < total:
                self._write_progress(shown, name, _STARTS[stage].format(_amount(stage, total)))
            elif not was_complete and done >= total:
                self._write_progress(shown, name, _ENDS[stage].format(_amount(stage, total)))
            elif done < total and time.monotonic() >= shown.next_line_s[name]:
                self._write_progress(shown, name, f"{_STARTS[stage].format(_amount(stage, total))}: {done / total:.0%}")

    def close_bar(self) -> None:
        """Take the progress bars off the terminal."""
        with self._lock, contextlib.suppress(OSError):
            for stage in self._stages.values():
                stage.close()
            self._stages.clear()

    def _write_progress(self, stage: _Stage, name: str, text: str) -> None:
        stage.next_line_s[name] = time.monotonic() + self._line_interval_s
        self._write(f"[{name}] {text}\n")

    def _write(self, text: str) -> None:
        for stage in self._stages.values():
            stage.clear()
        self._stream.write(text)
        self._stream.flush()


class _Stage:
    """One stage of the start of all children: by name (done, total) and when the next line may come; their common
    bar."""

    def __init__(self, stage: str) -> None:
        self.progress: dict[str, tuple[int, int]] = {}
        self.next_line_s: dict[str, float] = {}
        self._stage = stage
        self._bar: tqdm[NoReturn] | None = None

    def is_complete(self, name: str) -> bool:
        done, total = self.progress[name]
        return done >= total

    def show(self, stream: TextIO, delay_s: float) -> None:
        if self._bar is None:
            # children report a few times a second, so every report is shown
            self._bar = tqdm(file=stream, leave=False, delay=delay_s, mininterval=0, **_BARS[self._stage])
        self._bar.total = sum(total for _, total in self.progress.values())
        self._bar.update(sum(done for done, _ in self.progress.values()) - self._bar.n)

    def clear(self) -> None:
        if self._bar is not None:
            self._bar.clear()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _amount(stage: str, total: int) -> str:
    return f"{total / 1e6:.1f} MB" if stage == WEIGHTS else str(total)
