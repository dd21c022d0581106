from __future__ import annotations

import pytest

from baton.bench.limits.quantized_step import main


def test_each_kind_of_weights_decodes_and_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--shape", "tiny", "--rounds", "2", "--batch", "2"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "batch 2, threads 1, 2 rounds"
    assert [line.split(":")[0] for line in lines] == ["bfloat16", "int8", "int4"]
    assert "x1.00 of least, x1.00 of halves, pairs 1.00 to 1.00" in lines[0]
