"""Who a request came from, as the rest of the router sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.router.http.access.account import Account


@dataclass(frozen=True, slots=True)
class Identity:
    """The key that a request came with: its name in the key file, and the root of its cache salts (32 bytes). Then the
    account of what it uses, and whether it may change the deployment."""

    name: str
    cache_root: bytes = field(repr=False)
    account: Account = field(repr=False)
    is_operator: bool = False
