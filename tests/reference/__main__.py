"""`python -m tests.reference`: write the pages of docs/reference/ that are made from the code."""

from __future__ import annotations

from tests.reference.settings_page import PAGE, settings_page

PAGE.write_text(settings_page())
