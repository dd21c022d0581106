"""Processes of engines are asked for the right things, and what they answer becomes cells."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.peers.engines import ROWS, Peers, rows_of
from tests.peers.llama_cpp import Programs
from tests.peers.llama_cpp import measure as measure_llama_cpp
from tests.peers.trial import answers, step_cells
from tests.peers.work import Work, measure, perplexity, work_of


class Counting:
    """An engine whose times are numbers of tokens."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def prompt_s(self, token_ids: Sequence[int]) -> float:
        return float(len(token_ids))

    def steps_s(self, prompts: Sequence[Sequence[int]], num_steps: int) -> list[float]:
        return [1000.0] * 3 + [sum(map(len, prompts))] * (num_steps - 3)

    def log_probabilities(self, token_ids: Sequence[int]) -> Sequence[float]:
        return [-float(token_id) for token_id in token_ids[1:]]


def lines(output: str) -> dict[str, float]:
    return {each["case"]: each["value"] for each in map(json.loads, output.splitlines())}


def test_each_case_is_said_and_first_steps_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.json"
    text.write_text(json.dumps([[9, 9, 0, 0]]))
    monkeypatch.setattr(
        sys, "argv", ["engine", "model", "--prompts", "7", "--steps", "2x5", "--text", str(text), "--threads", "1"]
    )
    measure(Counting)
    assert lines(capsys.readouterr().out) == {"7": 7.0, "2x5": 10.0, "perplexity": 1.0}


def test_flags_that_only_one_engine_has_are_left_to_it() -> None:
    work = work_of(["file", "--threads", "2", "--prompts", "512", "--steps", "8x512", "--binaries", "folder"])
    assert (work.num_threads, work.prompts, work.steps) == (2, (512,), ((8, 512),))
    assert work.rest == ("--binaries", "folder")
    assert work.max_batch == 8
    assert work.max_context > 512


def test_a_perplexity_is_of_the_second_half_of_each_window() -> None:
    """Of 6 tokens, five have a logarithm: those of the last two count, as in llama.cpp."""
    assert perplexity([[-99.0, -99.0, -99.0, 0.0, 0.0]]) == 1.0


def program(folder: Path, name: str, output: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\necho \"$@\" >> {folder}/asked\ncat <<'END'\n{output}\nEND\n")
    path.chmod(0o755)


def test_llama_cpp_prints_seconds_of_prompts_and_of_all_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = [{"pp": 512, "pl": 1, "t_pp": 3.0, "t_tg": 0.24}, {"pp": 512, "pl": 8, "t_pp": 2.0, "t_tg": 2.4}]
    program(tmp_path, "llama-batched-bench", "\n".join(["a log", *map(json.dumps, printed)]))
    measure_llama_cpp(Work("m", 1, (512,), ((1, 512), (8, 512)), None), Programs(tmp_path, "m", 1))
    assert lines(capsys.readouterr().out) == pytest.approx({"512": 2.0, "1x512": 0.01, "8x512": 0.1})
    assert "-npp 512 -ntg 24 -npl 1,8 -pps -no-kvu" in (tmp_path / "asked").read_text()


def test_llama_cpp_has_a_perplexity_of_the_text_beside_the_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program(tmp_path, "llama-perplexity", "Final estimate: PPL = 5.25 +/- 0.1")
    text = tmp_path / "text.json"
    text.write_text(json.dumps([[1] * 512] * 4))
    measure_llama_cpp(Work("m", 1, (), (), text), Programs(tmp_path, "m", 1))
    assert lines(capsys.readouterr().out) == {"perplexity": 5.25}
    assert f"{tmp_path}/text.txt -c 512 -b 512 --chunks 4" in (tmp_path / "asked").read_text()


def test_cells_have_tokens_a_second_and_the_time_over_the_first_rows() -> None:
    found = {"Baton int4": {"512": [1.0, 1.0], "8x512": [0.1, 0.1]}, "llama.cpp Q4_0": {"512": [2.0, 1.5]}}
    once = {"Baton int4": {"512": [1.0]}, "vLLM": {"512": [2.0]}}
    assert step_cells(once)["vLLM"] == {"prompt of 512": "2,000 ms, 256/s (2.00)"}
    assert step_cells(found) == {
        "Baton int4": {"prompt of 512": "1,000 ms, 512/s", "decode step, batch 8, context 512": "100 ms, 80/s"},
        "llama.cpp Q4_0": {"prompt of 512": "1,750 ms, 293/s (1.75; 1.50 to 2.00)"},
    }


def test_an_engine_that_fails_is_named_and_has_no_values(capsys: pytest.CaptureFixture[str]) -> None:
    broken = [sys.executable, "-c", 'print(\'{"case": "512", "value": 1}\'); raise SystemExit(\'no such weights\')']
    assert answers(broken, [], {0}) == {}
    assert "no such weights" in capsys.readouterr().err


def test_rows_are_of_engines_that_are_here() -> None:
    alone = Peers(None, "", "")
    assert {row.engine for row in rows_of("4", (), alone)} == {"Baton"}
    peers = Peers(Path("bin"), "python", "env A=1 python")
    assert rows_of("8", (), peers) == list(ROWS["8"])
    (row,) = rows_of("8", ("Q8_0 file",), peers)
    subject = row.subject(Path("models/qwen"), Path("files"))
    assert subject == Path("files/qwen/Q8_0.gguf")
    assert peers.command(row, subject) == [sys.executable, "-m", "tests.peers.baton_engine", "files/qwen/Q8_0.gguf"]
