"""Proposers of text, as the setting says."""

from __future__ import annotations

from baton.engine.scheduler.proposer import Proposer
from baton.engine.speculation.settings import read_asked, text_proposer


def proposer_of(config: str) -> Proposer | None:
    """What drafts from text where this is asked for; None for nothing. Raises `InvalidSetting`."""
    asked = read_asked(config)
    return None if asked is None else text_proposer(asked)
