"""The answers of /v1/models. Does not know how a model is served; all here is a pure function of its arguments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

_OWNER = "baton"


def model_object(
    name: str,
    created: int,
    max_model_len: int | None = None,
    kinds: Sequence[str] = ("text",),
    thinking_switches: Sequence[str] = (),
) -> dict[str, Any]:
    """One model, for /v1/models/NAME. vLLM adds these too: `max_model_len` (prompt and output together), and `root`,
    which its load generator reads when it is not told a model. Here `root` is the name again: a path is not shown.
    `kinds`: of what a prompt may hold, as `input_modalities`. `thinking_switches`: of the chat template, see there.
    """
    model: dict[str, Any] = {"id": name, "object": "model", "created": created, "owned_by": _OWNER, "root": name}
    model |= {"input_modalities": [*kinds], "thinking_switches": [*thinking_switches]}
    return model if max_model_len is None else {**model, "max_model_len": max_model_len}


def model_list(models: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The answer of /v1/models."""
    return {"object": "list", "data": list(models)}
