"""Who a request came from, as the rest of the router sees it, and the salt of the prefix cache that follows from it.

The salt keeps one key from finding out what another one has sent. A prefix that is cached is answered sooner, reported
in `cached_tokens`, and drawn to the node that has it. With a salt of its own in the hashes of its blocks, a key sees
all three for its own prefixes only. Keys of one group share a salt.

Invariant: a salt of the client is mixed in and never replaces the one of its key, so no choice of it reaches the cache
of another key.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field

from baton.router.http.access.account import Account

_OF_KEY, _OF_GROUP, _OF_CLIENT = b"key\0", b"group\0", b"client\0"


@dataclass(frozen=True, slots=True)
class Identity:
    """The key that a request came with: its name in the key file, and the root of its cache salts (32 bytes). Then the
    account of what it uses, and whether it may change the deployment."""

    name: str
    cache_root: bytes = field(repr=False)
    account: Account = field(repr=False)
    is_operator: bool = False


def cache_root_of(secret: bytes, name: str, group: str | None) -> bytes:
    """The salt (32 bytes) of a key in a group, or of one that has its cache for itself. A key and a group of the same
    name have different salts."""
    scope = _OF_KEY + name.encode() if group is None else _OF_GROUP + group.encode()
    return hmac.digest(secret, scope, "sha256")


def cache_salt_of(identity: Identity | None, client_salt: str | None) -> bytes:
    """The salt (32 bytes, or none) for a request's blocks. `identity` is None where no keys are in use: all clients
    then share one cache, but for the salts that they send themselves."""
    root = b"" if identity is None else identity.cache_root
    if client_salt is None:
        return root
    text = _OF_CLIENT + client_salt.encode("utf-8", "surrogatepass")
    return hmac.digest(root, text, "sha256") if root else hashlib.sha256(text).digest()
