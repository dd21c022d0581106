from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from baton.bench.workload.dataset_settings import DatasetSettings, Workload
from baton.bench.workload.files import AZURE_SAMPLE, MOONCAKE_SAMPLE, TRACES
from baton.bench.workload.passages import Vocabulary, bare_vocabulary
from baton.bench.workload.registry import make_workload
from baton.wire.errors import InvalidSetting

BARE = bare_vocabulary(8000)
BLOCK = 16


def trace(name: str, vocabulary: Vocabulary = BARE, **changes: Any) -> Workload:
    return make_workload(DatasetSettings(**{"dataset_name": name, "length_divisor": 32, **changes}), vocabulary)


def mooncake_rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (TRACES / MOONCAKE_SAMPLE).read_text().splitlines()]


def prompts(workload: Workload) -> list[tuple[int, ...]]:
    return [prompt.token_ids for prompt in workload.prompts]


@pytest.mark.parametrize(
    ("name", "sha256"),
    [
        (MOONCAKE_SAMPLE, "9e81b386f0d8cea16d376b041d7a7e8fed5ba65b53e989444c76cef408442c2a"),
        (AZURE_SAMPLE, "67e66e281943344644b374e8e23d76964adb70bc13eb7c2fc021edd65cafc0b6"),
    ],
)
def test_the_bundled_traces_are_the_published_ones(name: str, sha256: str) -> None:
    assert hashlib.sha256((TRACES / name).read_bytes()).hexdigest() == sha256
    assert f"`{sha256}`" in (TRACES / "README.md").read_text()


def test_lengths_are_divided_and_rounded_up_in_every_row() -> None:
    rows, made = mooncake_rows(), trace("mooncake", num_prompts=5000)
    assert len(made.prompts) == len(rows) == 2000
    for row, prompt in zip(rows, made.prompts, strict=True):
        assert len(prompt.token_ids) == math.ceil(row["input_length"] / 32)
        assert math.ceil(len(prompt.token_ids) / BLOCK) == len(row["hash_ids"])
        assert prompt.num_output_tokens == math.ceil(row["output_length"] / 32)
        assert prompt.arrival_s == row["timestamp"] / 1000


def tokens_of_prefixes(rows: Sequence[dict[str, Any]], made: Sequence[tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
    """Block id -> the tokens up to the end of that block, whole blocks only; each id has one prefix."""
    found: dict[int, tuple[int, ...]] = {}
    for row, prompt in zip(rows, made, strict=True):
        for index, block_id in enumerate(row["hash_ids"][: len(prompt) // BLOCK]):
            prefix = prompt[: (index + 1) * BLOCK]
            assert found.setdefault(block_id, prefix) == prefix
    return found


@pytest.mark.parametrize("name", ["words", "opened"])
def test_equal_block_ids_are_equal_prefixes_and_others_are_not(name: str, request: pytest.FixtureRequest) -> None:
    rows, made = mooncake_rows()[:400], prompts(trace("mooncake", request.getfixturevalue(name), num_prompts=400))
    found = tokens_of_prefixes(rows, made)
    assert [len(prompt) for prompt in made] == [math.ceil(row["input_length"] / 32) for row in rows]
    assert len(set(found.values())) == len(found) > 5000


def test_azure_has_its_lengths_and_its_microseconds() -> None:
    made = trace("azure", num_prompts=2000, length_divisor=1)
    assert made.facts["input_tokens"] == {"mean": 1104.783, "median": 1032.0, "max": 7930, "total": 2_209_565}
    assert made.facts["output_tokens"]["total"] == sum(prompt.num_output_tokens for prompt in made.prompts) == 529_807
    assert made.prompts[0].arrival_s == 0.0
    assert made.prompts[-1].arrival_s == pytest.approx(424.259457, abs=1e-9)
    assert len({prompt.arrival_s for prompt in made.prompts}) == 2000
    assert len(set(prompts(made))) == 2000


ROW = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}


def written(folder: Path, *rows: object) -> str:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return str(path)


HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
LINE = "2023-11-16 18:15:46.6805900,374,44"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "it is not JSON"),
        ({}, "timestamp: Field required"),
        ({**ROW, "timestamp": -1}, "timestamp: .*found -1"),
        ({**ROW, "timestamp": math.nan}, "timestamp: .*found nan"),
        ({**ROW, "input_length": 6.5}, "input_length: .*found 6.5"),
        ({**ROW, "input_length": 10**12}, "input_length: .*found 1000000000000"),
        ({**ROW, "hash_ids": [0, "1"]}, r"hash_ids\.1: .*found '1'"),
        ({**ROW, "hash_ids": [0]}, "1 hash_ids for 600 tokens, not one for each 512"),
    ],
)
def test_a_damaged_mooncake_row_is_an_error_that_says_where(row: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match=rf"trace.jsonl, line 2: {message}"):
        trace("mooncake", dataset_path=written(tmp_path, ROW, row))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([HEADER, LINE, "soon,1,1"], "line 3: TIMESTAMP: .*found 'soon'"),
        ([HEADER, LINE, "2023-11-16 18:15:47"], "line 3: ContextTokens: .*found None"),
        ([HEADER, LINE, LINE.replace("44", "9" * 5000)], "line 3: GeneratedTokens: .*found '999"),
        ([HEADER, LINE, LINE.replace("00,3", "00+00:00,3")], "line 3: some times have a zone and some have none"),
        ([HEADER, LINE, "x" * 200_000], "line 3: it is not CSV"),
        ([], "it has no rows"),
    ],
)
def test_a_damaged_azure_row_is_an_error_that_says_where(lines: list[str], message: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes("\r\n".join(lines).encode())
    with pytest.raises(InvalidSetting, match=rf"trace.csv(, |: ){message}"):
        trace("azure", dataset_path=str(path))


@pytest.mark.parametrize(
    ("divisor", "message"),
    [
        (48, "--length-divisor 48 does not divide 512"),
        (512, "--length-divisor leaves a block length of 1, too short for 38788"),
    ],
)
def test_divisors_that_cannot_be_used_are_named(divisor: int, message: str) -> None:
    with pytest.raises(InvalidSetting, match=message):
        trace("mooncake", num_prompts=2000, length_divisor=divisor)
