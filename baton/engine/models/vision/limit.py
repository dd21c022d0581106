"""The setting `--limit-mm-per-prompt`, by vLLM's name: how many images a request may have."""

from __future__ import annotations

import json
from contextlib import suppress

from baton.wire.errors import InvalidSetting
from baton.wire.media import MAX_MEDIA


def image_limit(setting: str) -> int:
    """The number in `image=N`, or in vLLM's `{"image": N}`; nothing is said of other media. Raises
    `InvalidSetting`."""
    found: object = None
    name, _, number = setting.partition("=")
    if name == "image" and number.isascii() and number.isdigit():
        found = int(number)
    else:
        with suppress(ValueError):
            content = json.loads(setting)
            found = content.get("image") if isinstance(content, dict) and len(content) == 1 else None
    if type(found) is not int or not 0 <= found <= MAX_MEDIA:
        raise InvalidSetting(f"--limit-mm-per-prompt {setting!r:.100} is not image=N, with N from 0 to {MAX_MEDIA}")
    return found
