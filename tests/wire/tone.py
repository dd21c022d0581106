"""A kind of medium that only tests have: tones, a token for each of their samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from struct import pack
from typing import Annotated, ClassVar

import pytest

import baton.wire.prompt
from baton.wire.codec import Bounds, OneOf
from baton.wire.errors import InvalidMessage
from baton.wire.images import PromptImage
from baton.wire.media import DIGEST_BYTES, Medium


@dataclass(frozen=True, slots=True)
class Tone(Medium):
    """Its payload are samples of 16 bits, one for each token."""

    kind: ClassVar[str] = "tone"
    kind_number: ClassVar[int] = 255

    rate_hz: Annotated[int, Bounds(1, 192_000)]

    def check_payload(self) -> None:
        """Raise `InvalidMessage` unless these are its samples."""
        if self.digest != _digest_of(self.payload):
            raise InvalidMessage("the samples of a tone do not have its digest")


def tone(start: int, samples: Sequence[int]) -> Tone:
    """A tone at that place of a prompt."""
    payload = pack(f"<{len(samples)}H", *samples)
    return Tone(start, len(samples), _digest_of(payload), payload, 8000)


def register_tones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts may have tones, in codecs that are made from now on."""
    kinds = Annotated[Medium, OneOf((PromptImage, Tone))]
    monkeypatch.setattr(baton.wire.prompt, "AnyMedium", kinds)


def _digest_of(payload: bytes) -> bytes:
    return blake2b(payload, digest_size=DIGEST_BYTES).digest()
