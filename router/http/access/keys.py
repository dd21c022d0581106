"""API keys: the file that lists them, and which key a request came with.

Owns the format of the key file and the comparison. The file has one TOML table per key, whose name is the key's name:

    [alice]
    sha256 = "..."               # of the key; `baton keys new alice` prints both
    group = "research"           # keys of one group share the prefix cache; without a group a key shares it with none
    requests_per_minute = 60     # this and the next two: no limit when left out
    tokens_per_minute = 100000
    max_concurrent_requests = 8
    operator = true              # may drain and restart nodes; no key may that does not say so

Invariants: a key itself is never stored, only its digest; a comparison looks at every key, so that its duration says
nothing about which one was nearly right. Does not know HTTP, and does not keep count of what a key uses.
"""

from __future__ import annotations

import hashlib
import hmac
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec

from baton.wire.errors import InvalidSetting

KEY_VARIABLE = "BATON_API_KEY"
"""The environment variable with one key, for the router and for `baton chat`."""
_NAME = r"^[A-Za-z0-9_-]{1,64}\Z"
_Name: TypeAlias = Annotated[str, msgspec.Meta(pattern=_NAME)]
_Limit: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=2**53)]


class ApiKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The entry of one key in the file. A limit that is None does not exist."""

    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-fA-F]{64}\Z")]
    group: _Name | None = None
    requests_per_minute: _Limit | None = None
    tokens_per_minute: _Limit | None = None
    max_concurrent_requests: _Limit | None = None
    operator: bool = False


class KeyTable:
    """The keys that are valid now, by name."""

    def __init__(self, keys: Mapping[str, ApiKey]) -> None:
        self.keys = dict(keys)
        self._digests = [(name, bytes.fromhex(key.sha256)) for name, key in keys.items()]

    def name_of(self, presented: str) -> str | None:
        """The name of the key that was presented, None when it is none of these."""
        digest = digest_of(presented)
        found: str | None = None
        for name, known in self._digests:
            if hmac.compare_digest(digest, known):
                found = name
        return found


def digest_of(key: str) -> bytes:
    """SHA-256 of a key. Any text has one, also what is no valid Unicode."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def read_key_file(path: Path) -> dict[str, ApiKey]:
    """The keys in a file. Raises `InvalidSetting`, which quotes nothing of the file but names and fields."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        keys = msgspec.convert(content, dict[_Name, ApiKey])
    except OSError as error:
        raise InvalidSetting(f"key file {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise InvalidSetting(f"key file {path}: it is not UTF-8") from None
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise InvalidSetting(f"key file {path}: {error}") from None
    if not keys:
        raise InvalidSetting(f"key file {path}: it has no keys; `baton keys new NAME` makes one")
    if len({key.sha256.lower() for key in keys.values()}) != len(keys):
        raise InvalidSetting(f"key file {path}: two names have the same key")
    return keys
