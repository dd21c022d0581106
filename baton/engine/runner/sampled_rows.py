"""One row of a step's sampling: how it is drawn, and the grammar that its token obeys.

Owns the noise of a row, which depends on nothing but its arguments: the same request sampled by another node, after a
preemption or in another batch gets the same.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple, Protocol

from baton.engine.scheduler.request import MaskSource
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams

_NOISE_KEY = struct.Struct("<qqq")
_NOISE = struct.Struct("<d")


class SampledRow(NamedTuple):
    """One row that is not greedy. `width`: see `SampleGroup`; top_k: V when it is off."""

    row: int
    width: int
    top_k: int
    temperature: float
    noise: float
    top_p: float
    min_p: float

    @property
    def is_truncated(self) -> bool:
        """Whether tokens with a weight may be left out, depending on the weights of others."""
        return self.width > 0 or self.min_p > 0.0


class GrammarRow(NamedTuple):
    """A row with a grammar. `allowed`: no other token may be sampled anyway; () allows all. `ends`: tokens that are
    sampled only where the grammar allows no other. `sampled`: how it is drawn, None where it takes the largest logit.
    `is_tried`: it is drawn as if it had no grammar first.
    """

    row: int
    matcher: MaskSource
    allowed: Sequence[int] = ()
    ends: Sequence[int] = ()
    sampled: SampledRow | None = None
    is_tried: bool = True

    @property
    def drawn_again(self) -> SampledRow | None:
        """How it is drawn from the tokens that its grammar allows; None where it takes the largest of them."""
        if self.sampled is None or not self.is_tried:
            return self.sampled
        row, width, top_k, temperature, noise, top_p, min_p = self.sampled
        return SampledRow(row, width, top_k, temperature, noise_after(noise), top_p, min_p)


def uniform_noise(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing but its arguments; all are signed 64-bit."""
    return _noise_of(_NOISE_KEY.pack(seed, choice, position))


def noise_after(noise: float) -> float:
    """A number in [0, 1) that depends on `noise` alone, and tells nothing about it."""
    return _noise_of(_NOISE.pack(noise))


def _noise_of(key: bytes) -> float:
    return (int.from_bytes(blake2b(key, digest_size=8).digest(), "little") >> 11) / 2**53


class SampledRequest(Protocol):
    """The fields of a request that sampling reads; `ScheduledRequest` has them."""

    @property
    def key(self) -> RequestKey:
        """For errors."""
        ...

    @property
    def token_ids(self) -> Sequence[int]:
        """The prompt and everything generated."""
        ...

    @property
    def prompt(self) -> Prompt:
        """The prompt; what comes behind it is output."""
        ...

    @property
    def params(self) -> DecodingParams:
        """The parameters by which the next token is sampled."""
        ...

    @property
    def matcher(self) -> MaskSource | None:
        """What knows which tokens the grammar of the request allows next; None without a grammar."""
        ...

    @property
    def takes_largest(self) -> bool:
        """Whether `params` are known to ask for the largest logit alone."""
        ...


def position_of(request: SampledRequest) -> int:
    """Output index of the token to sample. A token that is still being sampled counts."""
    return len(request.token_ids) - len(request.prompt.token_ids)  # for each row of a step: no property
