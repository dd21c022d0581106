from __future__ import annotations

import importlib.util

import pytest

from bench.command import BENCHMARKS, main, module_of


def test_alone_it_lists_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in BENCHMARKS)


def test_an_unknown_benchmark_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["strange"])
    assert "invalid choice" in capsys.readouterr().err


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_in_the_list_is_there(name: str) -> None:
    assert importlib.util.find_spec(module_of(name)) is not None
