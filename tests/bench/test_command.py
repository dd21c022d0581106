from __future__ import annotations

import importlib

import pytest

from baton.bench.command import BENCHMARKS, main, module_of


def test_alone_it_lists_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in BENCHMARKS)


def test_an_unknown_benchmark_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["strange"])
    assert "unknown benchmark" in capsys.readouterr().err


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_in_the_list_is_there(name: str) -> None:
    module = module_of(name)
    assert module.startswith("baton."), "what is installed has no package of another name"
    assert callable(importlib.import_module(module).main)
