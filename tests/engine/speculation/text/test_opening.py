"""Without the compiled library there are drafts from a plain search, and one line says so."""

from __future__ import annotations

import logging
from ctypes import CDLL

import pytest

from baton.engine.scheduler.request import Request
from baton.engine.speculation.text.ngrams import NgramText
from baton.engine.speculation.text.opening import open_sources
from baton.engine.speculation.text.suffixes import SuffixRules
from baton.wire.prompt import Prompt
from baton.wire.sampling import DecodingParams
from tests.request_keys import A


def test_a_machine_without_the_library_searches(caplog: pytest.LogCaptureFixture) -> None:
    def missing() -> CDLL:
        raise OSError("there was no C++ compiler")

    with caplog.at_level(logging.WARNING):
        sources = open_sources(SuffixRules("suffix", 1, 0.2, 1.0, 24, 0.1), 5, 10000, missing)
    assert [record.getMessage() for record in caplog.records] == [
        "drafts are searched for in the last tokens of each request alone: there was no C++ compiler"
    ]
    assert sources.others is None
    found = sources.own(Request(A, Prompt.of([1]), DecodingParams(), b"", 100))
    assert isinstance(found, NgramText)
    found.read([1, 2, 3, 4, 1, 2])
    assert found.draft(2).token_ids == [3, 4]
