"""A prompt as the router makes it, once: it travels whole to the nodes, and through their engines.

Owns what the KV of a prompt depends on beside the model: its token ids, its salt, its media, its adapter. Whatever
more will make equal tokens have different KV belongs here, and into `baton.engine.cache.hashing`, which names blocks by
it. What an attempt knows beyond the prompt, above all the tokens that its client has already, travels beside it.

Invariants: a prompt is not changed. An attempt that continues after a failure has the same one as the first, so its ids
are in memory once in each program that keeps them, and are never copied to be passed on. The router makes all of it: a
salt or a digest that a client names is never taken as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from baton.wire.codec import Length, OneOf, TokenIds
from baton.wire.images import PromptImage
from baton.wire.media import MAX_MEDIA, Medium

MAX_SALT_BYTES = 32
ADAPTER_BYTES = 16
AnyMedium = Annotated[Medium, OneOf((PromptImage,))]
"""Every kind of medium that a prompt may have. This is the only list of them."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The ids of all its tokens. `cache_salt`: prompts share cached KV only with those of the same salt. `media`:
    those that stand among the tokens, in order; with payload where they may have to be computed. `adapter`: digest of
    what is added to the model, empty for nothing. Names are not sent: what they stand for may change."""

    token_ids: TokenIds
    cache_salt: Annotated[bytes, Length(MAX_SALT_BYTES)] = b""
    media: Annotated[tuple[AnyMedium, ...], Length(MAX_MEDIA)] = ()
    adapter: Annotated[bytes, Length(ADAPTER_BYTES)] = b""

    @classmethod
    def of(
        cls,
        token_ids: Iterable[int],
        cache_salt: bytes = b"",
        media: Iterable[Medium] = (),
        adapter: bytes = b"",
    ) -> Prompt:
        """The prompt of these tokens, in whatever they are at hand."""
        return cls(tuple(token_ids), cache_salt, tuple(media), adapter)

    @property
    def num_tokens(self) -> int:
        """The tokens of the prompt alone: the first one that is generated behind it has output index 0."""
        return len(self.token_ids)

    @property
    def media_kinds(self) -> frozenset[str]:
        """The kinds of its media: who computes it, or goes on behind it, has to know them all."""
        return frozenset([medium.kind for medium in self.media])

    def followed_by(self, output_ids: Sequence[int]) -> tuple[int, ...]:
        """The prompt's token ids with `output_ids` behind them. Without any, it is the prompt's own tuple, not a
        copy."""
        return (*self.token_ids, *output_ids) if output_ids else self.token_ids

    def first(self, num_tokens: int) -> Prompt:
        """The prompt of the first `num_tokens` tokens of this one, at least one."""
        media = tuple(medium for medium in self.media if medium.start < num_tokens)
        return replace(self, token_ids=self.token_ids[:num_tokens], media=media)

    def without_payload(self) -> Prompt:
        """This prompt for a node that gets the KV, and needs no payload of media."""
        return replace(self, media=tuple(medium.without_payload() for medium in self.media)) if self.media else self
