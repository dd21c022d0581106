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
    write_file(Path(path), text, f"{flag} ")


def write_file(path: Path, content: str | bytes, origin: str = "", *, makes_folder: bool = False) -> Path:
    """Write `path`; `origin` stands before it in an error. Raises `InvalidSetting` when that does not work."""
    try:
        if makes_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise InvalidSetting(f"{origin}{path}: {error.strerror}") from None
    return path
