"""Compares every architecture of `architectures` with transformers, each in a folder of its own; a line for each.

    python -m tests.engine.models.modelling

Ends with the status 1 when one differs or is refused.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from baton.wire.errors import ModelLoadError
from tests.engine.models.families import Family, make_model
from tests.engine.models.modelling.architectures import ALSO_COMPUTED, COMPUTED
from tests.engine.models.test_families import answers, assert_same, built, prompts


def compared(folder: Path, family: Family) -> str:
    """What was found; "" for a model that is as transformers computes it."""
    model = make_model(folder, family)
    one, other = prompts()
    try:
        engine = built(folder, model_impl="transformers")
        for answer in (*answers(engine, one), *answers(engine, other), *answers(engine, one, other)):
            assert_same(model, answer)
    except (AssertionError, ModelLoadError) as error:
        return str(error)
    return ""


def main() -> int:
    """Compare all."""
    status = 0
    for name, family in {**COMPUTED, **ALSO_COMPUTED}.items():
        with tempfile.TemporaryDirectory() as folder:
            found = compared(Path(folder), family)
        print(f"{name}: {found or 'equal'}", flush=True)  # noqa: T201 - this is its output
        status |= bool(found)
    return status


if __name__ == "__main__":
    sys.exit(main())
