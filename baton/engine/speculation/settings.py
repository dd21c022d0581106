"""What `--speculative-config` asks for: which proposer guesses tokens, in the words of vLLM.

Owns the reading of the setting, and knows no model. Proposers of text are made here; what has a model of its own is
made of what was asked for.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec

from baton.engine.scheduler.proposer import Proposer
from baton.engine.settings import AUTO
from baton.engine.speculation.text.opening import open_sources
from baton.engine.speculation.text.proposer import TextProposer
from baton.engine.speculation.text.suffixes import SuffixRules
from baton.wire.errors import InvalidSetting

_USUAL_LENGTH = 5
_FLAG = "--speculative-config"
_NONE = "none"
_USUAL_TOKENS, _SPEC_FACTOR = 16, 4.0
GREEDY, STANDARD = "greedy", "standard"
_LEAST_SURE = 0.3
"""What a single token before says once is less. Drafts of less are wrong so often that a request seems to have nothing
to copy, and has none where it would copy much."""
_MOST = 64
_Tokens = Annotated[int, msgspec.Meta(ge=1, le=_MOST)]


class Ngrams(msgspec.Struct, forbid_unknown_fields=True, tag_field="method", tag="ngram", frozen=True):
    """Where one of the two lengths is not said, it is the other."""

    num_speculative_tokens: _Tokens
    prompt_lookup_max: _Tokens | None = None
    prompt_lookup_min: _Tokens | None = None

    def __post_init__(self) -> None:
        longest, shortest = self._lengths
        if shortest > longest:
            raise ValueError(f"prompt_lookup_min {shortest} is above prompt_lookup_max {longest}")

    def proposer(self) -> Proposer:
        longest, shortest = self._lengths
        rules = SuffixRules("ngram", shortest, 0.0, spec_factor=_MOST, max_depth=_MOST, least_share=0.0)
        return TextProposer(self.num_speculative_tokens, open_sources(rules, longest, 0), rules.method)

    @property
    def _lengths(self) -> tuple[int, int]:
        """The longest and the shortest."""
        longest = self.prompt_lookup_max or self.prompt_lookup_min or _USUAL_LENGTH
        return longest, self.prompt_lookup_min or longest


class Suffixes(
    msgspec.Struct, forbid_unknown_fields=True, tag_field="method", tag="suffix", frozen=True, omit_defaults=True
):
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


class _OtherCheckpoint(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A model or a head of its own."""

    num_speculative_tokens: _Tokens
    model: str
    revision: str = ""
    draft_tensor_parallel_size: Annotated[int, msgspec.Meta(ge=1, le=1)] = 1

    @property
    def checkpoint(self) -> str:
        """As `--model` names one."""
        return f"{self.model}@{self.revision}" if self.revision else self.model


class DraftModelAsked(_OtherCheckpoint, tag_field="method", tag="draft_model", frozen=True):
    """A second checkpoint. `max_model_len`: longer requests get no drafts; None: as long as that model can.
    `draft_sample_method`: "probabilistic" draws guesses as the request draws tokens, "greedy" takes the likeliest.
    `rejection_sample_method`: "exact" draws tokens as without drafts; "standard" draws them so that more guesses are
    right, from the same distribution (`baton.engine.runner.drawing`). Both accept by comparing."""

    quantization: str | None = None
    max_model_len: Annotated[int, msgspec.Meta(ge=2)] | None = None
    draft_sample_method: Literal["probabilistic", "greedy"] = "probabilistic"
    rejection_sample_method: Literal["exact", "standard"] = "exact"


class Eagle3Asked(_OtherCheckpoint, tag_field="method", tag="eagle3", frozen=True):
    """A head in a checkpoint of its own."""


class MtpAsked(msgspec.Struct, tag_field="method", tag="mtp", forbid_unknown_fields=True, frozen=True):
    """The layer for further tokens that the model ships."""

    num_speculative_tokens: _Tokens = 1


class _DeepseekMtp(MtpAsked, tag="deepseek_mtp", frozen=True):
    """An older name of the same, as the next two."""


class _Qwen3NextMtp(MtpAsked, tag="qwen3_next_mtp", frozen=True): ...


class _Glm4MoeMtp(MtpAsked, tag="glm4_moe_mtp", frozen=True): ...


TextAsked: TypeAlias = Ngrams | Suffixes
HeadAsked: TypeAlias = Eagle3Asked | MtpAsked
Asked: TypeAlias = TextAsked | DraftModelAsked | HeadAsked | _DeepseekMtp | _Qwen3NextMtp | _Glm4MoeMtp
_DECODER = msgspec.json.Decoder[Asked](Asked)


_USUAL = msgspec.json.encode(
    Suffixes(num_speculative_tokens=_USUAL_TOKENS, suffix_decoding_max_spec_factor=_SPEC_FACTOR)
).decode()


def chosen_config(config: str, *, is_useful: bool) -> str:
    """What `config` comes to, "" for no drafts: "auto" is text where it `is_useful`."""
    if config == AUTO:
        return _USUAL if is_useful else ""
    return "" if config == _NONE else config


def read_asked(config: str) -> Asked | None:
    """What `config`, a JSON object, asks for; None for "", and for what a node chooses. Raises `InvalidSetting`."""
    if config in ("", AUTO, _NONE):
        return None
    try:
        asked: Asked = _DECODER.decode(config)
    except msgspec.DecodeError as error:
        raise InvalidSetting(f"{_FLAG} {config!r:.200}: {error}") from None
    return asked


def text_proposer(asked: Asked) -> Proposer:
    """What drafts from text: alone where that was asked for, and before what has layers of its own."""
    if isinstance(asked, TextAsked):
        return asked.proposer()
    num_tokens = max(_USUAL_TOKENS, asked.num_speculative_tokens)
    return Suffixes(num_speculative_tokens=num_tokens, suffix_decoding_max_spec_factor=_SPEC_FACTOR).proposer()
