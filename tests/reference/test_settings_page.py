"""docs/reference/settings.md has every setting that a program takes, as the code has it."""

from __future__ import annotations

from tests.reference.settings_page import PAGE, settings_page


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == settings_page(), "run python -m tests.reference"
