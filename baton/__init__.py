"""Baton for Python programs: `from baton import LLM, Grammar, SamplingParams`.

They are imported when they are first asked for: `import baton` by itself loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from baton.offline.llm import LLM
    from baton.wire.grammar import Grammar
    from baton.wire.sampling import SamplingParams

__all__ = ["LLM", "Grammar", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from baton.offline.llm import LLM

        return LLM
    if name == "Grammar":
        from baton.wire.grammar import Grammar

        return Grammar
    if name == "SamplingParams":
        from baton.wire.sampling import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
