"""Pages say what their result files say."""

from __future__ import annotations

import json
import re
import statistics

import pytest

from tests.figures import CHART, PAGES, ROOT, TABLES, chart, compared, filled, measured

_AGAIN = "run `python -m tests.figures`"


@pytest.mark.parametrize("page", PAGES)
def test_figures_on_a_page_are_those_of_their_files(page: str) -> None:
    text = (ROOT / page).read_text()
    assert filled(text) == text, f"{page} has other figures than its files: {_AGAIN}"


def test_the_chart_is_of_its_file() -> None:
    assert (ROOT / CHART).read_text() == chart(), f"{CHART} has other figures than its file: {_AGAIN}"


def test_every_table_is_shown_somewhere_and_every_mark_is_closed() -> None:
    text = "".join((ROOT / page).read_text() for page in PAGES)
    shown = re.findall(r"<!-- figures: (\S+) -->", text)
    assert {*TABLES, "campaigns", "soak", *measured()} == {*shown}
    assert len(shown) == text.count("<!-- end -->")


def test_the_readme_counts_what_the_files_count() -> None:
    campaigns = [json.loads(line) for line in (ROOT / "docs/campaigns.jsonl").read_text().splitlines()]
    models = re.search(r"^\d+ models(?=, of each)", (ROOT / "docs/models.md").read_text(), re.MULTILINE)
    text = (ROOT / "README.md").read_text()
    assert f"{sum(each['faults'] for each in campaigns):,} injected faults" in text
    assert models is not None
    assert f"{models[0]} token by token" in text


def test_what_stands_between_marks_is_written_anew_and_the_rest_is_left() -> None:
    page = "before\n<!-- figures: throughput -->\n{}<!-- end -->\nafter\n"
    assert filled(page.format("| 999 |\n")) == page.format(compared("throughput"))


def test_a_table_has_medians_of_the_rounds_in_its_file() -> None:
    runs = json.loads((ROOT / "bench/results/llama-32m-placement.json").read_text())["runs"]
    found = [run["result"]["output_throughput"] for run in runs if (run["target"], run["rate"]) == ("one", "inf")]
    row = next(line for line in compared("throughput").splitlines() if "output tokens/s" in line)
    assert row.split(" | ")[2].startswith(f"**{statistics.median(found):.0f}**")


def test_a_name_that_nothing_has_is_an_error() -> None:
    with pytest.raises(KeyError):
        filled("<!-- figures: speed -->\n<!-- end -->")
