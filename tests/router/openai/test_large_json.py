from __future__ import annotations

import asyncio
from typing import Any

import pytest

from router.openai.large_json import large_json_bytes
from router.openai.responses import json_bytes


@pytest.mark.parametrize(
    "payload",
    [
        {},
        {"a": [], "b": {}, "c": None, "d": "\u2028\ud800é", 'e"\n': [1, [2.5, True], {"x": [None]}]},
        {"choices": [{"tokens": ["é"] * 64, "more": list(range(65))}, {"listed": [None, *[{"1": {"rank": 1}}] * 200]}]},
        {"long": [[list(range(130))] * 3] * 129},
    ],
)
def test_it_is_the_json_of_small_answers(payload: dict[str, Any]) -> None:
    assert asyncio.run(large_json_bytes(payload)) == json_bytes(payload)
