"""The fields of a request that say how tokens are sampled, and a sentence on each for docs/api.md.

A field is named as in `DecodingParams`, whose construction checks its range; the types here say what JSON may hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from baton.router.http.openai.fields import AllowedTokens, LogitBias, TokenIds

SAMPLING: Mapping[str, str] = {
    "allowed_token_ids": "No other token is sampled.",
    "frequency_penalty": "-2 to 2, for each earlier occurrence of a token.",
    "ignore_eos": "The token that ends an answer does not end it.",
    "logit_bias": "Token ids and what is added to their logits, -100 to 100.",
    "min_p": "Tokens less likely than this share of the likeliest are not sampled.",
    "min_tokens": "Neither a stop string nor a stop token ends the output before.",
    "presence_penalty": "-2 to 2, once for each token that occurred.",
    "repetition_penalty": "Above 1: tokens of prompt and output become less likely.",
    "seed": "The same request with the same seed has the same answer.",
    "stop_token_ids": "Tokens that end the output.",
    "temperature": "0 to 2; 0: always the likeliest token.",
    "top_k": "Only so many of the likeliest tokens are sampled; 0 or -1: all.",
    "top_p": "Only the likeliest tokens that have this probability together are sampled.",
}


class SamplingFields(BaseModel):
    """The fields with which clients say how tokens are sampled."""

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: LogitBias = ()
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    stop_token_ids: TokenIds = ()
    ignore_eos: bool = False
    allowed_token_ids: AllowedTokens = ()

    def sampling(self) -> dict[str, Any]:
        """The fields of `DecodingParams` that they are."""
        values = {name: getattr(self, name) for name in SamplingFields.model_fields if name != "logit_bias"}
        values["logit_bias_ids"] = tuple(token_id for token_id, _ in self.logit_bias)
        values["logit_bias_values"] = tuple(value for _, value in self.logit_bias)
        return values
