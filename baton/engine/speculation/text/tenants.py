"""What the outputs of each tenant say, for drafts of its other requests.

A tenant is all requests of the same root hash: those who share a prefix cache. So nobody's draft has a token of another
tenant's text. Owns the bounds: of a tenant's texts the newest are kept, and of the tenants those that asked last.
"""

from __future__ import annotations

from collections.abc import Callable

from baton.engine.native.texts import Texts

MAX_TENANT_TOKENS = 1 << 16
"""Some 6 MB."""
MAX_TOKENS = 1 << 20
"""Of all tenants, when a request begins: some 100 MB. What the texts of running requests become until they leave comes
on top, in as far as their tenants were dropped meanwhile."""
_MAX_TENANTS = 1024


class TenantTexts:
    """`open_texts`: makes texts of which the newest so many tokens are kept, at most twice as many."""

    def __init__(self, open_texts: Callable[[int], Texts]) -> None:
        self._open = open_texts
        self._texts: dict[bytes, Texts] = {}

    def of(self, hash_root: bytes) -> Texts:
        """Those of the tenant, to whom a request begins to belong. Their reader keeps them."""
        texts = self._texts.pop(hash_root, None) or self._open(MAX_TENANT_TOKENS // 2)
        self._texts[hash_root] = texts
        num_tokens = sum([each.num_tokens for each in self._texts.values()])
        while len(self._texts) > 1 and (num_tokens > MAX_TOKENS or len(self._texts) > _MAX_TENANTS):
            oldest = self._texts.pop(next(iter(self._texts)))
            num_tokens -= oldest.num_tokens
        return texts
