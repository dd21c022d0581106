"""Texts of tenants: each has its own, and all of them together have a bound."""

from __future__ import annotations

from baton.engine.native.texts import TextReader, Texts
from baton.engine.speculation.text import tenants
from baton.engine.speculation.text.tenants import MAX_TENANT_TOKENS, MAX_TOKENS, TenantTexts
from tests.engine.native.compiled import library, needs_kernels

pytestmark = needs_kernels


def tenant_texts() -> TenantTexts:
    return TenantTexts(lambda max_tokens: Texts(library(), max_tokens))


def said(texts: Texts, token_ids: range) -> int:
    """How many of these the texts have had before, as one piece. They are added."""
    reader = TextReader(texts)
    reader.read(token_ids)
    return reader.first.match


def test_a_tenant_finds_its_own_texts_again_and_nobody_elses() -> None:
    found = tenant_texts()
    assert said(found.of(b"a"), range(100, 110)) == 0
    assert said(found.of(b"b"), range(100, 110)) == 0
    assert said(found.of(b"a"), range(100, 110)) == 10
    assert said(found.of(b""), range(100, 110)) == 0


def test_a_tenant_has_so_many_tokens_at_most() -> None:
    found, start = tenant_texts(), 0
    for start in range(0, 3 * MAX_TENANT_TOKENS, 5000):
        said(found.of(b"a"), range(start, start + 5000))
        assert found.of(b"a").num_tokens <= MAX_TENANT_TOKENS
    assert said(found.of(b"a"), range(start, start + 9)) == 9
    assert said(found.of(b"a"), range(9)) == 0


def test_tenants_that_have_not_asked_for_longest_are_forgotten() -> None:
    found, each = tenant_texts(), MAX_TENANT_TOKENS // 2
    num_tenants = MAX_TOKENS // each + 4
    said(found.of(b"first"), range(9))
    for number in range(num_tenants):
        said(found.of(b"%d" % number), range(each))
        found.of(b"first")
    assert said(found.of(b"first"), range(9)) == 9
    assert said(found.of(b"%d" % (num_tenants - 1)), range(9)) == 9
    assert [found.of(b"%d" % number).num_tokens for number in range(3)] == [0, 0, 0]


def test_tenants_that_say_nothing_are_forgotten_too() -> None:
    found = tenant_texts()
    said(found.of(b"first"), range(9))
    for number in range(tenants._MAX_TENANTS):
        found.of(b"%d" % number)
    assert found.of(b"first").num_tokens == 0
