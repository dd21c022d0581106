"""How much one answer may hold that is not streamed: such an answer stays in memory until its last token.

Owns the two limits. They are checked before anything is allocated or sent to a node. Text is cheap and log
probabilities are not, so each has a limit of its own. A request that names no `max_tokens` is never refused: its
choices end with "length" where the limit is.
"""

from __future__ import annotations

from dataclasses import replace

from baton.wire.errors import InvalidRequest
from baton.wire.sampling import DecodingParams

MAX_HELD_TOKENS = 2**22
MAX_HELD_LOGPROBS = 2**20


def bounded(params: DecodingParams, num_choices: int, room: int, limit_name: str) -> DecodingParams:
    """`params` for an answer of `num_choices` choices that is not streamed. `room`: the tokens that fit into the
    context behind the longest prompt; `limit_name`: what the client calls `max_tokens`.

    Raises `InvalidRequest` when choices x max_tokens, or with log probabilities choices x max_tokens x
    (1 + top_logprobs), is more than one answer may hold.
    """
    num_per_token = 0 if params.logprobs is None else 1 + params.logprobs
    most_tokens = MAX_HELD_TOKENS // num_choices
    if num_per_token:
        most_tokens = min(most_tokens, MAX_HELD_LOGPROBS // (num_choices * num_per_token))
    if params.max_tokens is None:
        return params if room <= most_tokens else replace(params, max_tokens=max(most_tokens, params.min_tokens))
    if params.max_tokens <= most_tokens:
        return params
    wanted = f"{num_choices} choices x {params.max_tokens} tokens"
    if num_per_token:
        what = f"{wanted} x {num_per_token} log probabilities is more than the {MAX_HELD_LOGPROBS}"
    else:
        what = f"{wanted} is more than the {MAX_HELD_TOKENS}"
    raise InvalidRequest(f"{limit_name}: {what} that an answer may hold; ask for less, or for a stream", limit_name)
