from __future__ import annotations

import json
import math

from bench.facts import collect_facts
from bench.gpu_check.groups import Group
from bench.gpu_check.machine import parse_clocks
from bench.gpu_check.rows import Row, Verdict, failed_row, figure_row, missing_row, time_row
from bench.gpu_check.run import CORRECTNESS, GroupResult
from bench.gpu_check.table import counts, document, render

ROWS = (
    Row("attention", "bfloat16", 0.25, "of max", 0.02, None, Verdict.WRONG, note="n" * 300),
    time_row("decode step", "8B, batch 1", 4.0, "ms", floor=3.0, share=0.75),
    missing_row("transfer", "nccl", "one GPU"),
    failed_row("graphs", "tokens", "did not answer within 30 s"),
)
RESULT = GroupResult(Group("speed", "how fast", 50), ROWS, taken_s=12.4, limit_s=50.0)


def test_the_table_says_value_limit_share_target_and_verdict() -> None:
    lines = render([RESULT]).splitlines()
    assert "speed: how fast (12 s of 50 s)" in lines
    step = next(line for line in lines if line.startswith("decode step"))
    assert step.split() == ["decode", "step", "8B,", "batch", "1", "4", "ms", "3", "75%", "4", "ok"]
    wrong = next(line for line in lines if line.startswith("attention"))
    assert "0.25 of max" in wrong
    assert "WRONG" in wrong
    assert len(wrong) < 260
    assert next(line for line in lines if "one GPU" in line).startswith("transfer")
    assert lines[-1] == "1 WRONG, 1 FAILED, 1 ok, 1 not run"


def test_columns_stand_under_their_headings() -> None:
    lines = render([RESULT]).splitlines()
    heading, rows = lines[0], [line for line in lines if line.startswith(("attention", "decode step"))]
    for name in ("target", "limit"):
        end = heading.index(name) + len(name)
        assert all(line[end] == " " for line in rows)
    assert {line.index(word) for line, word in zip(rows, ("WRONG", "ok"), strict=True)} == {heading.index("verdict")}


def test_correctness_that_was_not_checked_is_said_at_the_end() -> None:
    group = GroupResult(RESULT.group, (missing_row(CORRECTNESS, "graphs", "this is no checkout"),), 1.0, 50.0)
    assert render([RESULT, group]).splitlines()[-1] == "Correctness was NOT checked (graphs): this is no checkout"


def test_nothing_is_said_to_be_nothing() -> None:
    assert counts([]) == "no rows"


def test_the_document_holds_everything_and_is_plain_json() -> None:
    rows = (*ROWS, figure_row("e", "c", math.nan, "ms"))
    result = GroupResult(RESULT.group, rows, 1.0, 50.0)
    content = document(collect_facts("command", ("numpy",)), {"device": "x"}, {"before": []}, [result], 1)
    read = json.loads(json.dumps(content, allow_nan=False))
    assert read["status"] == 1
    assert read["facts"]["command"] == "command"
    (group,) = read["groups"]
    assert [row["verdict"] for row in group["rows"]] == ["WRONG", "ok", "not run", "FAILED", "doubted"]
    assert group["rows"][1]["share"] == 0.75


def test_what_nvidia_smi_says_is_read_by_column() -> None:
    answer = "NVIDIA H200, 580.159.04, 1980 MHz, 3201 MHz, 1980 MHz, 3201 MHz, 700.00 W, 41\n\n"
    (gpu,) = parse_clocks(answer)
    assert gpu["name"] == "NVIDIA H200"
    assert gpu["driver_version"] == "580.159.04"
    assert (gpu["clocks.sm"], gpu["temperature.gpu"]) == ("1980 MHz", "41")
    assert parse_clocks("") == []
