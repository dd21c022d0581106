"""Pages of a list: which rows they have, and where they end."""

from __future__ import annotations

import pytest

from baton.router.http.stored.records import MAX_PAGE_BYTES, ItemRow, NoSuchItem, Page

ROWS = [ItemRow(number, 1, f"{number}", 1) for number in range(5)]
LARGE = [ItemRow(number, 1, f"{number}", MAX_PAGE_BYTES // 2 + 1) for number in range(3)]


def numbers(page: Page, rows: list[ItemRow] = ROWS) -> tuple[list[int], bool]:
    found, has_more = page.cut(rows)
    return [row.number for row in found], has_more


def test_a_page_begins_after_an_item_and_has_so_many() -> None:
    assert numbers(Page(2)) == ([0, 1], True)
    assert numbers(Page(2, after="2")) == ([3, 4], False)
    assert numbers(Page(2, is_descending=True, after="3")) == ([2, 1], True)
    assert numbers(Page(2, after="4")) == ([], False)
    with pytest.raises(NoSuchItem):
        numbers(Page(2, after="5"))


def test_a_page_ends_where_its_items_are_large_and_has_one_at_least() -> None:
    assert numbers(Page(3), LARGE) == ([0], True)
    assert numbers(Page(3, after="1"), LARGE) == ([2], False)
    assert numbers(Page(9), [*ROWS, *LARGE]) == ([0, 1, 2, 3, 4, 0], True)
