"""The goals for latency that a request asks for: fields of its body, or headers, which every interface has.

Owns their names and what is allowed. A goal says when tokens are wanted and never what they are. The operator's goals
count for whoever asks for none. A router that has no goal of a kind ignores what a request says of it; a goal that is
tighter than the operator allows would slow everybody else down, and is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from baton.router.http.openai.ignored import Ignored, IgnoredFields
from baton.router.routing.goals import NO_GOALS, AllowedGoals, Goals
from baton.wire.errors import InvalidRequest

MAX_GOAL_MS = 3_600_000.0
TTFT, TPOT = "goal_ttft_ms", "goal_tpot_ms"
_UNUSED = {name: Ignored("this router has no such goal") for name in (TTFT, TPOT)}


class _Asking(Protocol):
    """A request that may ask for goals."""

    goal_ttft_ms: float | None
    goal_tpot_ms: float | None


def header_of(name: str) -> str:
    """The header that says the same as the field of that name."""
    return f"x-baton-{name.replace('_', '-')}"


def asked_goals(
    request: _Asking, headers: Mapping[str, str], allowed: AllowedGoals | None, notes: IgnoredFields
) -> Goals | None:
    """The goals of a request, None when it asks for none of its own; a field counts before its header. Raises
    `InvalidRequest`."""
    own, least = (allowed.own, allowed.least) if allowed else (NO_GOALS, NO_GOALS)
    ttft_s = _asked_s(TTFT, request.goal_ttft_ms, headers, own.ttft_s, least.ttft_s, notes)
    tpot_s = _asked_s(TPOT, request.goal_tpot_ms, headers, own.tpot_s, least.tpot_s, notes)
    if ttft_s is None and tpot_s is None:
        return None
    return Goals(own.ttft_s if ttft_s is None else ttft_s, own.tpot_s if tpot_s is None else tpot_s)


def _asked_s(
    name: str, value: float | None, headers: Mapping[str, str], own_s: float, least_s: float, notes: IgnoredFields
) -> float | None:
    """The seconds of one goal; None when the request does not ask for it, or in vain."""
    if value is None:
        name, value = _from_header(name, headers)
    if value is None:
        return None
    if not own_s:
        field = name.removeprefix("x-baton-").replace("-", "_")
        code = notes.ignore(field, value, _UNUSED)
        if code is not None:
            raise InvalidRequest(f"{name} is not supported: this router has no such goal", name, code)
        return None
    if value < 1000 * least_s:
        raise InvalidRequest(f"{name} must be at least {1000 * least_s:g} at this router", name)
    return value / 1000


def _from_header(name: str, headers: Mapping[str, str]) -> tuple[str, float | None]:
    header = header_of(name)
    text = headers.get(header)
    if text is None:
        return name, None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= MAX_GOAL_MS:
        raise InvalidRequest(f"{header} must be a number of milliseconds above 0, at most {MAX_GOAL_MS:.0f}", header)
    return header, value
