"""What is cached of a prompt's beginning is held and handed over, until nobody reads it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.engine.cache.hashing import prompt_digest
from baton.kvtransfer.commands import BeginHandoff, CancelSending, FinishHandoff, Rejected, Released, SendingNotice
from baton.node import lender as lending
from baton.node.lender import PrefixLender
from baton.wire.prompt import Prompt
from tests.node.sharing import PROMPT, cache, lend, make_core, sending_end
from tests.request_keys import A, B, C


def test_as_much_as_is_cached_is_lent_and_released_behind_the_last_reader() -> None:
    core, (end, thread, notices) = make_core(), sending_end()
    lender = PrefixLender(core, end)
    cache(core, PROMPT.first(8), B)
    assert lender.lend(lend(A), 1.0) == 8
    begin, finish = thread.commands
    assert begin == BeginHandoff(A, "T", 5, 8, prompt_digest(PROMPT.first(8)))
    assert isinstance(finish, FinishHandoff)
    assert (finish.firsts, len(finish.table), core.status().num_leased_blocks) == ((), 2, 2)
    lender.cancel(A)
    lender.cancel(C)
    assert thread.commands[2:] == [CancelSending(A, "cancelled")]
    assert core.status().num_held_blocks == 2, "it may still be read"
    notices.put(Released(A))
    lender.poll()
    assert (core.status().num_held_blocks, core.status().num_cached_blocks, list(lender.keys)) == (0, 2, [])
    core.check()


@pytest.mark.parametrize("other", [replace(PROMPT, cache_salt=b"other"), replace(PROMPT, adapter=bytes(range(16)))])
def test_what_is_of_another_tenant_or_adapter_is_not_lent(other: Prompt) -> None:
    core, (end, thread, _) = make_core(), sending_end()
    cache(core, PROMPT, B)
    assert PrefixLender(core, end).lend(lend(A, other), 1.0) == 0
    assert thread.commands == []


def test_what_is_not_cached_is_in_use_or_too_much_is_not_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    core, (end, _, _) = make_core(), sending_end()
    lender = PrefixLender(core, end)
    assert lender.lend(lend(A), 1.0) == 0
    cache(core, PROMPT, B)
    assert lender.lend(lend(A), 1.0) == 16
    assert lender.lend(lend(A), 1.0) == 0
    monkeypatch.setattr(lending, "MAX_LENT", 1)
    assert lender.lend(lend(B), 1.0) == 0


def test_a_handoff_that_is_refused_holds_nothing_and_others_are_left_alone() -> None:
    core, (end, _, notices) = make_core(), sending_end()
    lender = PrefixLender(core, end)
    cache(core, PROMPT, B)
    lender.lend(lend(A), 1.0)
    found: list[SendingNotice] = [Released(C), Rejected(A, "known already")]
    for notice in found:
        notices.put(notice)
    lender.poll()
    assert core.status().num_held_blocks == 0
    assert lender.rest.notices.take() == [Released(C)]
