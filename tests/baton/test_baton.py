"""What `import baton` gives to a Python program."""

from __future__ import annotations

import subprocess
import sys

import pytest

import baton
from baton.offline.llm import LLM
from baton.wire.grammar import Grammar
from baton.wire.sampling import SamplingParams


@pytest.mark.parametrize("line", ["import baton", "from baton import SamplingParams", "import baton.__main__"])
def test_nothing_loads_torch_that_does_not_need_it(line: str) -> None:
    code = f"{line}; import sys; sys.exit(bool({{'torch', 'transformers'}} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_both_names_are_there() -> None:
    assert baton.LLM is LLM
    assert baton.SamplingParams is SamplingParams
    assert baton.Grammar is Grammar
    assert baton.__all__ == ["LLM", "Grammar", "SamplingParams"]


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'baton' has no attribute 'Nothing'"):
        _ = baton.Nothing


def test_the_command_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "baton", "version"], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("baton ")
