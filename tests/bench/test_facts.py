from __future__ import annotations

import os

from baton.bench.facts import collect_facts


def test_facts_name_the_machine_and_what_is_installed() -> None:
    facts = collect_facts("baton bench kv --quick", ("numpy", "a-package-nobody-has"))
    assert facts.cores == tuple(sorted(os.sched_getaffinity(0)))
    assert facts.memory_bytes > 2**28
    assert set(facts.versions) == {"python", "numpy"}
    assert facts.describe()[-1] == "baton bench kv --quick"
