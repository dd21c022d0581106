"""What `--speculative-config` asks for: which proposer guesses tokens, in the words of vLLM.

Owns the reading of the setting, and knows no model. Proposers of text are made here; what has a model of its own is
made of what was asked for.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec

from baton.engine.scheduler.proposer import Proposer
from baton.engine.speculation.text.ngrams import NgramProposer
from baton.wire.errors import InvalidSetting

_USUAL_LENGTH = 5
_FLAG = "--speculative-config"
GREEDY = "greedy"
_Tokens = Annotated[int, msgspec.Meta(ge=1, le=64)]


class Ngrams(msgspec.Struct, tag_field="method", tag="ngram", forbid_unknown_fields=True, frozen=True):
    """Where one of the two lengths is not said, it is the other."""

    num_speculative_tokens: _Tokens
    prompt_lookup_max: _Tokens | None = None
    prompt_lookup_min: _Tokens | None = None


class DraftModelAsked(msgspec.Struct, tag_field="method", tag="draft_model", forbid_unknown_fields=True, frozen=True):
    """A second checkpoint. `max_model_len`: longer requests get no drafts; None: as long as that model can.
    `draft_sample_method`: "probabilistic" draws guesses as the request draws tokens, "greedy" takes the likeliest."""

    num_speculative_tokens: _Tokens
    model: str
    revision: str = ""
    quantization: str | None = None
    max_model_len: Annotated[int, msgspec.Meta(ge=2)] | None = None
    draft_tensor_parallel_size: Annotated[int, msgspec.Meta(ge=1, le=1)] = 1
    draft_sample_method: Literal["probabilistic", "greedy"] = "probabilistic"

    @property
    def checkpoint(self) -> str:
        """As `--model` names one."""
        return f"{self.model}@{self.revision}" if self.revision else self.model


Asked: TypeAlias = Ngrams | DraftModelAsked
_DECODER = msgspec.json.Decoder[Asked](Asked)


def read_asked(config: str) -> Asked | None:
    """What `config`, a JSON object, asks for; None for "". Raises `InvalidSetting`."""
    if not config:
        return None
    try:
        return _DECODER.decode(config)
    except msgspec.DecodeError as error:
        raise InvalidSetting(f"{_FLAG} {config!r:.200}: {error}") from None


def proposer_of(config: str) -> Proposer | None:
    """The proposer that `config` describes, where it needs no model. Raises `InvalidSetting`."""
    asked = read_asked(config)
    if not isinstance(asked, Ngrams):
        return None
    longest = asked.prompt_lookup_max or asked.prompt_lookup_min or _USUAL_LENGTH
    shortest = asked.prompt_lookup_min or longest
    if shortest > longest:
        raise InvalidSetting(f"{_FLAG}: prompt_lookup_min {shortest} is above prompt_lookup_max {longest}")
    return NgramProposer(asked.num_speculative_tokens, shortest, longest)
