"""The suite that Baton's own backends pass, and what only this one promises."""

from __future__ import annotations

import pytest
from counting_attention import CountingAttention, choose

from baton.engine.attention.choose import ChooseAttention
from baton.testing.attention import AttentionSuite, OpenRelay


class TestCounting(AttentionSuite):
    @pytest.fixture
    def choose(self) -> ChooseAttention:
        return choose

    def test_it_counts_what_it_computes(self, open_relay: OpenRelay) -> None:
        relay = open_relay()
        relay.add(5)
        relay.step(4)  # a prompt: token i sees i keys
        relay.step(1)
        counts = relay.attention
        assert isinstance(counts, CountingAttention)
        assert (counts.num_steps, counts.num_tokens, counts.num_pairs) == (2, 5, 1 + 2 + 3 + 4 + 5)
