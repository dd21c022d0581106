"""What `--speculative-config` asks for: which proposer guesses tokens, in the words of vLLM.

Owns the reading of the setting. Proposers are made once, before weights are loaded, and know no model.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from baton.engine.scheduler.proposer import Proposer
from baton.engine.speculation.text.ngrams import NgramProposer
from baton.wire.errors import InvalidSetting

_USUAL_LENGTH = 5
_Tokens = Annotated[int, msgspec.Meta(ge=1, le=64)]


class _Ngrams(msgspec.Struct, forbid_unknown_fields=True):
    """Where one of the two lengths is not said, it is the other."""

    method: Literal["ngram"]
    num_speculative_tokens: _Tokens
    prompt_lookup_max: _Tokens | None = None
    prompt_lookup_min: _Tokens | None = None


def proposer_of(config: str) -> Proposer | None:
    """The proposer that `config`, a JSON object, describes; None for "". Raises `InvalidSetting`."""
    if not config:
        return None
    try:
        asked = msgspec.json.decode(config, type=_Ngrams)
    except msgspec.DecodeError as error:
        raise InvalidSetting(f"--speculative-config {config!r:.200}: {error}") from None
    longest = asked.prompt_lookup_max or asked.prompt_lookup_min or _USUAL_LENGTH
    shortest = asked.prompt_lookup_min or longest
    if shortest > longest:
        raise InvalidSetting(f"--speculative-config: prompt_lookup_min {shortest} is above prompt_lookup_max {longest}")
    return NgramProposer(asked.num_speculative_tokens, shortest, longest)
