from __future__ import annotations

import pytest

from bench.serve.progress import progress_bar


def test_the_bar_counts_up_to_all_requests(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(True) as move:
        move(0, 3)
        for num_done in (1, 2, 3):
            move(num_done, 3)
    assert "3/3" in capsys.readouterr().err


def test_nothing_is_shown_before_the_first_call_or_when_it_is_not_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(True):
        pass
    with progress_bar(False) as move:
        move(0, 3)
        move(3, 3)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")
