"""What `--speculative-config` asks for: which proposer guesses tokens, in the words of vLLM.

Owns the reading of the setting. Proposers are made once, before weights are loaded, and know no model.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from baton.engine.scheduler.proposer import Proposer
from baton.engine.speculation.text.opening import open_sources
from baton.engine.speculation.text.proposer import TextProposer
from baton.engine.speculation.text.suffixes import SuffixRules
from baton.wire.errors import InvalidSetting

_USUAL_LENGTH = 5
_LEAST_SURE = 0.15
_MOST = 64
_Tokens = Annotated[int, msgspec.Meta(ge=1, le=_MOST)]


class _Ngrams(msgspec.Struct, forbid_unknown_fields=True, tag_field="method", tag="ngram"):
    """Where one of the two lengths is not said, it is the other."""

    num_speculative_tokens: _Tokens
    prompt_lookup_max: _Tokens | None = None
    prompt_lookup_min: _Tokens | None = None

    def proposer(self) -> Proposer:
        longest = self.prompt_lookup_max or self.prompt_lookup_min or _USUAL_LENGTH
        shortest = self.prompt_lookup_min or longest
        if shortest > longest:
            raise InvalidSetting(
                f"--speculative-config: prompt_lookup_min {shortest} is above prompt_lookup_max {longest}"
            )
        rules = SuffixRules("ngram", shortest, 0.0, spec_factor=_MOST, max_depth=_MOST, least_share=0.0)
        return TextProposer(self.num_speculative_tokens, open_sources(rules, longest, 0), rules.method)


class _Suffixes(msgspec.Struct, forbid_unknown_fields=True, tag_field="method", tag="suffix"):
    """Without a number of tokens it is the depth."""

    num_speculative_tokens: _Tokens | None = None
    suffix_decoding_max_tree_depth: Annotated[int, msgspec.Meta(ge=1)] = 24
    suffix_decoding_max_cached_requests: Annotated[int, msgspec.Meta(ge=0)] = 10000
    suffix_decoding_max_spec_factor: Annotated[float, msgspec.Meta(ge=0.0, le=1e6)] = 1.0
    suffix_decoding_min_token_prob: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.1

    def proposer(self) -> Proposer:
        depth = min(self.suffix_decoding_max_tree_depth, _MOST)
        rules = SuffixRules(
            "suffix",
            1,
            _LEAST_SURE,
            self.suffix_decoding_max_spec_factor,
            depth,
            self.suffix_decoding_min_token_prob,
        )
        sources = open_sources(rules, _USUAL_LENGTH, self.suffix_decoding_max_cached_requests)
        return TextProposer(self.num_speculative_tokens or depth, sources, rules.method)


def proposer_of(config: str) -> Proposer | None:
    """The proposer that `config`, a JSON object, describes; None for "". Raises `InvalidSetting`."""
    if not config:
        return None
    try:
        asked = msgspec.json.decode(config, type=_Ngrams | _Suffixes)
    except msgspec.DecodeError as error:
        raise InvalidSetting(f"--speculative-config {config!r:.200}: {error}") from None
    return asked.proposer()
