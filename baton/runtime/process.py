"""Functions that every program of Baton calls when it starts: logging, memory settings, and the check
that other programs have the cluster key."""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TextIO

import zmq
import zmq.auth.thread

from baton.wire.errors import InvalidSetting
from baton.wire.links import ZAP_DOMAIN

_MALLOC_TRIM_THRESHOLD, _MALLOC_MMAP_THRESHOLD, _MALLOC_ARENA_MAX = -1, -3, -8
_KEEP_BYTES, _LARGE_BYTES, _MOST_KEPT_BYTES = 2**30, 2**20, 2**23
_TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
LOG_FORMATS = ("text", "json")
FIELDS = "fields"
"""The name under which `extra` hands a log record members of its own."""
_log = logging.getLogger(__name__)


def configure_logging(level: str, log_format: str = "text") -> None:
    """Log to stderr: lines for people, or, with `log_format` "json", one JSON object per line.

    Lines that cannot be written, because a disk is full, are counted. Their number is logged as soon as a line can be
    written again.
    """
    handler = _CountingHandler()
    handler.setFormatter(make_formatter(log_format))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def make_formatter(log_format: str) -> logging.Formatter:
    """The formatter of that name among `LOG_FORMATS`."""
    return _JsonFormatter() if log_format == "json" else _TextFormatter(_TEXT_FORMAT)


class _CountingHandler(logging.StreamHandler[TextIO]):
    """Writes to stderr, and loses lines only knowingly."""

    _num_lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record to the log, and say how many lines were lost before it, if any."""
        num_before = self._num_lost
        super().emit(record)
        if num_before and self._num_lost == num_before:
            self._num_lost = 0
            _log.warning("%d lines of this log could not be written", num_before)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # its name in logging
        """Count a record that could not be written. Other errors than those of files are logging's."""
        if isinstance(sys.exc_info()[1], OSError):
            self._num_lost += 1
        else:
            super().handleError(record)


class _TextFormatter(logging.Formatter):
    """Lines as of old; a record's own fields follow its message, those without a value left out."""

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, FIELDS, {})
        shown = (f"{name}={value}" for name, value in fields.items() if value is not None and value != "")
        return " ".join((super().format(record), *shown))


class _JsonFormatter(logging.Formatter):
    """One object per line: time (seconds since 1970), level, logger, message, and the record's own fields, if any."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time_s": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps({**line, **getattr(record, FIELDS, {})}, ensure_ascii=False)


def pin_to_cores(cores: str) -> None:
    """Use these cores alone, for example "0" or "2,3". Raises `InvalidSetting`."""
    try:
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    except (ValueError, OSError) as error:
        raise InvalidSetting(f"--cpu-affinity {cores!r} is not a list of cores of this machine ({error})") from None


def keep_freed_memory() -> None:
    """Let glibc reuse freed memory: if it returned the memory to the system, every step and message would fault pages
    in."""
    _tell_malloc({_MALLOC_MMAP_THRESHOLD: _KEEP_BYTES, _MALLOC_TRIM_THRESHOLD: _KEEP_BYTES})


def give_back_freed_memory() -> None:
    """Let glibc return large freed pieces to the system: for a program that clients can make need much for a moment.

    Each thread would otherwise have a heap of its own, and each heap may keep 64 MiB at its end, which
    `return_freed_memory` does not reach.
    """
    _tell_malloc(
        {
            _MALLOC_ARENA_MAX: 1,
            _MALLOC_MMAP_THRESHOLD: _LARGE_BYTES,
            _MALLOC_TRIM_THRESHOLD: _MOST_KEPT_BYTES,
        }
    )


def _tell_malloc(options: Mapping[int, int]) -> None:
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return  # another C library: slower or larger, not wrong
    for option, value in options.items():
        mallopt(option, value)


def return_freed_memory() -> None:
    """Give freed memory that this process still keeps back to the system. To be called when a start, or other work, has
    needed more than the program will."""
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        return  # another C library


@contextmanager
def quick_imports() -> Iterator[None]:
    """A context for the imports of a start, in which garbage is not looked for: that takes a sixth of their time. Nor
    is it looked for later in what is there at the end, nearly all of which stays."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def freeze_startup_objects() -> None:
    """Exclude all objects that exist now from garbage collection. Call it once, at the end of a start.

    They live as long as the program, and each look through them would stop all requests for a tenth of a second.
    """
    gc.collect()
    gc.freeze()


class Admitting(Protocol):
    """Knows the public keys of those that may connect to this program."""

    def admits(self, public: bytes) -> bool:
        """Whether the program with that key may."""
        ...


@dataclass(frozen=True, slots=True)
class _OnlyAdmitted:
    """ZAP decision. pyzmq hands over keys in Z85, as ours are."""

    keys: Admitting

    def callback(self, domain: str, key: bytes) -> bool:
        return self.keys.admits(key)


def start_authenticator(
    context: zmq.Context[zmq.Socket[bytes]], keys: Admitting | None
) -> zmq.auth.thread.ThreadAuthenticator | None:
    """Let only programs that `keys` admits connect to the sockets of `context`. Returns the authenticator, which the
    caller stops; None without keys."""
    if keys is None:
        return None
    authenticator = zmq.auth.thread.ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(ZAP_DOMAIN, _OnlyAdmitted(keys))
    return authenticator
