"""A file that a benchmark is asked to write: looked at before anything is measured, written at the end."""

from __future__ import annotations

from pathlib import Path

from wire.errors import InvalidSetting


def require_folder(path: str | Path, flag: str = "--json") -> None:
    """Raise `InvalidSetting` when there is no folder for the file that `flag` names; "" names none."""
    if path != "" and not Path(path).absolute().parent.is_dir():
        raise InvalidSetting(f"{flag} {path}: there is no such folder")


def write_text(path: str, text: str, flag: str = "--json") -> None:
    """Write the file that `flag` names. Raises `InvalidSetting` when that does not work."""
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise InvalidSetting(f"{flag} {path}: {error.strerror}") from None
