"""`baton keys new NAME`: make an API key and its entry for the router's key file.

Owns what is printed: the entry goes to stdout, so that it can be appended to the file, and the key itself to stderr.
Invariant: the key is shown once and written nowhere.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import sys
from collections.abc import Sequence

from baton.runtime.command_line import CommandParser
from baton.wire.errors import InvalidSetting

PREFIX = "baton-"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def main(arguments: Sequence[str]) -> int:
    """Print a new key and its entry."""
    parser = CommandParser(
        prog="baton keys",
        description="Make an API key. Its entry for the file of --api-key-file goes to stdout, the key to stderr: "
        "`baton keys new alice >> keys.toml`, then send SIGHUP to the router or `baton serve`.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    new = commands.add_parser("new", help="make a key")
    new.add_argument("name", metavar="NAME", help="who gets the key: letters, digits, - and _")
    name: str = parser.parse(arguments).name
    key, entry = new_key(name)
    print(f"the key of {name}, which is shown only now: {key}", file=sys.stderr)
    print(entry)
    return 0


def new_key(name: str) -> tuple[str, str]:
    """A random key and the lines of the key file for it. Raises `InvalidSetting` for a name that the file cannot
    hold."""
    if not _NAME.fullmatch(name):
        raise InvalidSetting(f"name {name!r:.100}: use 1 to 64 letters, digits, - and _")
    key = PREFIX + secrets.token_urlsafe(32)
    return key, f'[{name}]\nsha256 = "{hashlib.sha256(key.encode()).hexdigest()}"'
