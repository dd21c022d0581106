"""A prompt as the router makes it, once: it travels whole to the nodes, and through their engines.

Owns what the KV of a prompt depends on beside the model: its token ids, its salt, its images, its adapter. Whatever
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

from baton.wire.codec import Length, TokenIds
from baton.wire.images import MAX_IMAGES, PromptImage

MAX_SALT_BYTES = 32
ADAPTER_BYTES = 16


@dataclass(frozen=True, slots=True)
class Prompt:
    """The ids of all its tokens. `cache_salt`: prompts share cached KV only with those of the same salt. `images`:
    those that stand among the tokens, in order; with pixels where they may have to be computed. `adapter`: digest of
    what is added to the model, empty for nothing. Names are not sent: what they stand for may change."""

    token_ids: TokenIds
    cache_salt: Annotated[bytes, Length(MAX_SALT_BYTES)] = b""
    images: Annotated[tuple[PromptImage, ...], Length(MAX_IMAGES)] = ()
    adapter: Annotated[bytes, Length(ADAPTER_BYTES)] = b""

    @classmethod
    def of(
        cls,
        token_ids: Iterable[int],
        cache_salt: bytes = b"",
        images: Iterable[PromptImage] = (),
        adapter: bytes = b"",
    ) -> Prompt:
        """The prompt of these tokens, in whatever they are at hand."""
        return cls(tuple(token_ids), cache_salt, tuple(images), adapter)

    @property
    def num_tokens(self) -> int:
        """The tokens of the prompt alone: the first one that is generated behind it has output index 0."""
        return len(self.token_ids)

    def followed_by(self, output_ids: Sequence[int]) -> tuple[int, ...]:
        """The prompt's token ids with `output_ids` behind them. Without any, it is the prompt's own tuple, not a
        copy."""
        return (*self.token_ids, *output_ids) if output_ids else self.token_ids

    def first(self, num_tokens: int) -> Prompt:
        """The prompt of the first `num_tokens` tokens of this one, at least one."""
        images = tuple(image for image in self.images if image.start < num_tokens)
        return replace(self, token_ids=self.token_ids[:num_tokens], images=images)

    def without_pixels(self) -> Prompt:
        """This prompt for a node that gets the KV, and needs no pixels."""
        return replace(self, images=tuple(image.without_pixels() for image in self.images)) if self.images else self
