"""The walk that a reader is told stays short, goes forward, and names what is there."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.walk.stations import stations

ROOT = Path(__file__).resolve().parents[2]
MAX_FILES = 25
ROOMS = {
    "router": "router",
    "baton/node": "node",
    "prefill_node": "node",
    "decode_node": "node",
    "baton/engine": "engine",
    "kvtransfer": "kvtransfer",
}


def test_a_request_goes_through_few_files_and_comes_back_to_none() -> None:
    walk = stations()
    assert [each.number for each in walk] == list(range(1, len(walk) + 1))
    assert len({each.source for each in walk}) == len(walk)
    assert 0 < len(walk) <= MAX_FILES
    rooms = {room for each in walk for folder, room in ROOMS.items() if each.source.startswith(f"{folder}/")}
    assert rooms == set(ROOMS.values())
    assert all(any(each.source.startswith(f"{folder}/") for folder in ROOMS) for each in walk)


def test_every_station_is_there() -> None:
    missing = [each for each in stations() if each.function not in _functions(ROOT / each.source)]
    assert missing == []


def _functions(path: Path) -> set[str]:
    """Functions of a file, and methods as `Class.method`."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            methods = (each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
            found.update(f"{node.name}.{method.name}" for method in methods)
    return found
