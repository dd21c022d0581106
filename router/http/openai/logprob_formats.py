"""Log probabilities of an answer, in the formats of chat and of completions.

Pure functions. Log probabilities are finite: -inf is written as -9999, as OpenAI does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

from baton.engine.text.choice_text import ScoredToken, TokenEntry
from baton.router.http.serving.json_pieces import Items

LOWEST_LOGPROB = -9999.0
_REPLACEMENT = "\ufffd"
_ENTRIES_AT_ONCE = 16


def chat_logprobs(entries: Iterable[TokenEntry]) -> dict[str, Any] | None:
    """The `logprobs` member of a chat choice; None when the request asked for none. The token that ends an answer is
    none of its content."""
    content = [
        {**_logprob_object(entry.chosen), "top_logprobs": [_logprob_object(token) for token in entry.top]}
        for entry in entries
        if entry.chosen is not None and not entry.is_end
    ]
    return {"content": content, "refusal": None} if content else None


def completion_logprobs(entries: Iterable[TokenEntry]) -> dict[str, Any] | None:
    """The `logprobs` member of a completions choice: parallel lists, one item per token; None when not asked for.

    A token that is no whole character is written `bytes:\\xe2`. Where the most likely tokens have one text several
    times, the chosen token has it as its key, or else the likeliest; the others have `token_id:` and their id.
    """
    reported = [(entry.text_offset, entry.chosen, entry.top) for entry in entries if entry.chosen is not None]
    if not reported:
        return None
    return {
        "tokens": [completion_token(chosen) for _, chosen, _ in reported],
        "token_logprobs": [finite_logprob(chosen.logprob) for _, chosen, _ in reported],
        "top_logprobs": [_top_logprobs(chosen, top) for _, chosen, top in reported],
        "text_offset": [offset for offset, _, _ in reported],
    }


def _top_logprobs(chosen: ScoredToken, top: Sequence[ScoredToken]) -> dict[str, float]:
    names = {completion_token(chosen): chosen.token_id}
    found: dict[str, float] = {}
    for token in (*top, chosen):
        name = completion_token(token)
        if names.setdefault(name, token.token_id) != token.token_id:
            name = f"token_id:{token.token_id}"
        found[name] = finite_logprob(token.logprob)
    return found


def completion_token(token: ScoredToken) -> str:
    """What `logprobs` of completions calls a token; see `completion_logprobs`."""
    if _REPLACEMENT not in token.text:
        return token.text
    try:
        return token.data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.data)


def finite_logprob(logprob: float) -> float:
    """`logprob` as JSON can say it."""
    return max(LOWEST_LOGPROB, logprob)  # in this order a NaN becomes the lowest value too


def _logprob_object(token: ScoredToken) -> dict[str, Any]:
    return {"token": token.text, "bytes": list(token.data), "logprob": finite_logprob(token.logprob)}


def whole_logprobs(
    render: Callable[[Sequence[TokenEntry]], dict[str, Any] | None], entries: Sequence[TokenEntry]
) -> dict[str, Any] | None:
    """What `render` makes of all `entries`, its lists as `Items`: a few entries are rendered at a time."""
    rendered = render(entries[:_ENTRIES_AT_ONCE])
    if rendered is None:
        return None

    def items(name: str) -> Iterable[object]:
        for start in range(0, len(entries), _ENTRIES_AT_ONCE):
            yield from (render(entries[start : start + _ENTRIES_AT_ONCE]) or {}).get(name, ())

    return {name: Items(items(name)) if isinstance(member, list) else member for name, member in rendered.items()}


def prompt_and_output(prompt: dict[str, list[Any]] | None, output: dict[str, Any] | None) -> dict[str, Any] | None:
    """The lists of `completion_logprobs` for the tokens of an echoed prompt and those of the output, which may be
    `Items`."""
    if prompt is None or output is None:
        return prompt or output
    return {name: Items(chain(prompt[name], _items_of(output[name]))) for name in prompt}


def _items_of(values: Items | list[Any]) -> Iterable[object]:
    return values.items if isinstance(values, Items) else values
