"""Lines of campaigns, and their sum."""

from __future__ import annotations

import json
from pathlib import Path

from tests.campaign.gaps import Bound, Gap, GapJudge
from tests.campaign.load import RESUME, WELL, Asked, Load
from tests.campaign.results import LEAK, WRONG, append, line_of, summed
from tests.campaign.settings import parse
from tests.campaign.strangers import Strangers
from tests.campaign.test_load import ENTRY


def test_lines_are_appended_and_sum_up(tmp_path: Path) -> None:
    load, strangers = Load.__new__(Load), Strangers(1, 1, lambda each: None, sees=False)
    load.asked = [Asked(0, ENTRY, RESUME, 1.0, end=WELL, num_resumed=1, num_told_again=2, moments_s=[[1.5, 4.0]])]
    load.num_tokens = 3
    strangers.statuses[400] = 7
    judge = GapJudge.__new__(GapJudge)
    judge.judged = [(Gap(load.asked[0], 1.5, 4.0), Bound(5.0, "", (), 1.0))]
    file = tmp_path / "new" / "campaigns.jsonl"
    for seed in (1, 2):
        settings = parse(["--seed", f"{seed}", "--layout", "2P3D"])
        line = line_of(settings, load, strangers, [], {"router killed": 1}, judge)
        append(file, line, {WRONG: seed, LEAK: 1})
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["seed"] for line in lines] == [1, 2]
    assert parse(lines[1]["command"].split()[3:]).seed == 2
    total = summed(lines)
    assert (total["campaigns"], total["requests"], total["streamed_tokens"], total["random_bodies"]) == (2, 2, 6, 14)
    assert (total["resumed"], total["told_again"], total["layout"]) == (2, 4, {"2P3D": 2})
    assert (total["worst_gap_s"], total["nearest_gap"]) == (2.5, 0.5)
    assert (total["findings"][WRONG], total["findings"][LEAK]) == (3, 2)
    assert (total["right"], total["excused"]) == ({"completions text": 2}, {"router killed": 2})
