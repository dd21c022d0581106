"""The file of a measurement that takes long: whole after every save, and taken up again after an interruption.

Owns how the file is written and when it may be gone on with. Does not know what is in it but for `kind`, `arguments`
(what was measured) and `sessions` (when it was begun and gone on with).
Invariant: whatever happens, the file is one that was complete.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.facts import Facts
from bench.output_file import require_folder
from wire.errors import InvalidSetting


def begin(
    path: Path | None, kind: str, arguments: Sequence[str], facts: Facts, *, is_resumed: bool
) -> tuple[dict[str, Any], int]:
    """What the file holds so far, {} for nothing, and how often it was begun before. Its `sessions` has this one.

    Raises `InvalidSetting` for a file that holds something else, and for a folder that is not there.
    """
    found: dict[str, Any] = {}
    if path is not None:
        require_folder(path)
        if is_resumed and path.exists():
            found = _read(path, kind, arguments)
    sessions = found.get("sessions", [])
    this = {"time": facts.time, "commit": facts.commit, "load_average": facts.load_average}
    return {**found, "arguments": list(arguments), "sessions": [*sessions, this]} if found else {
        "kind": kind,
        "arguments": list(arguments),
        "sessions": [this],
    }, len(sessions)


def save(path: Path | None, document: Mapping[str, Any]) -> None:
    """Put `document` in the place of what is there, at once. Raises `InvalidSetting`."""
    if path is None:
        return
    beside = path.with_name(f"{path.name}.part")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(_text(document))
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        raise InvalidSetting(f"--json {path}: {error.strerror}") from None


def _read(path: Path, kind: str, arguments: Sequence[str]) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidSetting(f"--json {path} cannot be gone on with: {error}") from None
    if not isinstance(found, dict) or found.get("kind") != kind or "arguments" not in found:
        raise InvalidSetting(f"--json {path} holds something else: name another file, or begin anew with --no-resume")
    if found["arguments"] != list(arguments):
        changed = sorted(set(found["arguments"]).symmetric_difference(arguments))
        raise InvalidSetting(
            f"--json {path} was measured with other settings ({', '.join(changed):.300}): name another file, or begin"
            " anew with --no-resume"
        )
    return found


def _text(document: Mapping[str, Any]) -> str:
    """JSON with one line for each member, and for each map in a list: a change of one run is a change of one line."""
    members = [f"{json.dumps(key)}: {_member(value)}" for key, value in document.items()]
    return "{\n" + ",\n".join(members) + "\n}\n"


def _member(value: Any) -> str:
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return "[\n" + ",\n".join(json.dumps(item, allow_nan=False) for item in value) + "\n]"
    return json.dumps(value, allow_nan=False)
