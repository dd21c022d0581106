"""docs/models.md says which architectures run, and each of them is compared with transformers."""

from __future__ import annotations

from pathlib import Path

from baton.engine.models.registry import ARCHITECTURES
from baton.engine.models.rope_settings import ROPE_TYPES
from tests.engine.models.families import FAMILIES, SEEING
from tests.engine.models.modelling.architectures import ALSO_COMPUTED, COMPUTED
from tests.engine.models.models_page import compared_as, with_table

PAGE = Path(__file__).parents[3] / "docs" / "models.md"


def test_the_page_has_the_table_of_what_runs() -> None:
    page = PAGE.read_text()
    assert page == with_table(page), "run python -m tests.engine.models.models_page docs/models.md"


def test_every_architecture_is_compared() -> None:
    assert all(compared_as(family) for family in ARCHITECTURES.values())


def test_the_page_has_what_the_relay_compares() -> None:
    page = PAGE.read_text()
    names = [*FAMILIES, *SEEING, *COMPUTED, *ALSO_COMPUTED]
    missing = [name for name in names if f"\n| {name} | `" not in page]
    assert not missing, "run python -m tests.engine.models.relay --page docs/models.md"


def test_the_page_names_every_scaling_of_positions() -> None:
    page = PAGE.read_text()
    assert {name for name in ROPE_TYPES if f"`{name}`" not in page} == set()
