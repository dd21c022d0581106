"""The notebook's cells, in order, with small parameters: both targets are the relay of these tests."""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterator
from pathlib import Path

import matplotlib
import pytest
from matplotlib import pyplot

from tests.examples.conftest import EXAMPLES

NOTEBOOK = EXAMPLES / "split_against_one_node.ipynb"
MAX_BYTES = 50_000
_SMALL = {"RATES": [40], "DURATION_S": 0.5, "ROUNDS": 1, "INPUT_LEN": 16, "OUTPUT_LEN": 4}


def _code_cells() -> Iterator[tuple[str, list[str]]]:
    """The source and the tags of each."""
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        if cell["cell_type"] == "code":
            yield "".join(cell["source"]), cell["metadata"].get("tags", [])


@pytest.fixture
def _no_window() -> Iterator[None]:
    matplotlib.use("agg")
    yield
    pyplot.close("all")


@pytest.mark.usefixtures("_no_window")
def test_the_notebook_measures_and_draws(demo_url: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = tmp_path / "notebook.py"
    small = _SMALL | {"RESULT": str(tmp_path / "result.json"), "TARGETS": {"split": demo_url, "one": demo_url}}
    sources = []
    for source, tags in _code_cells():
        sources.append(source)
        if "parameters" in tags:
            sources += [f"{name} = {value!r}" for name, value in small.items()]
    script.write_text("\n\n".join(sources))
    runpy.run_path(str(script))
    assert "**split against one**" in capsys.readouterr().out
    lines = [axis.get_legend_handles_labels()[1] for axis in pyplot.gcf().axes]
    assert lines == [["split", "one"]] * 2


def test_it_is_kept_without_what_it_printed() -> None:
    assert NOTEBOOK.stat().st_size < MAX_BYTES
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert [cell for cell in cells if cell.get("outputs")] == []
