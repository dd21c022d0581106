"""`python -m tests.peers.trial steps|perplexity --model FOLDER --files FOLDER`: packed weights, engine beside engine.

    python -m tests.peers.trial steps --model qwen3-0.6b --files files --cores 0,1 --to docs/packed.jsonl \
        --llama-cpp llama.cpp/build/bin --openvino OPENVINO/bin/python --vllm 'env LD_PRELOAD=... VLLM/bin/python'

`steps`: prompts and decode steps. Each engine is started in each round, one after the other, pinned to the cores, with
a thread on each. `perplexity`: of Python's own help, the same tokens for all; it needs no quiet machine. FILES is what
`python -m tests.peers.files` has made. An engine that fails is named and left out.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from pydoc_data.topics import topics

from baton.bench.numbers import NONE, number, paired_ratio, rate, span, whole
from baton.engine.text.tokenizer import Tokenizer
from tests.measured import Cells, add_to, report
from tests.peers.engines import ROWS, Peers, Row, rows_of
from tests.peers.work import PERPLEXITY
from tests.system.prepared import die_with_parent

_ROOT = Path(__file__).resolve().parents[2]
_LONGEST_S = 600.0
_WINDOW = 512
Values = Mapping[str, Mapping[str, Sequence[float]]]
"""Of each row and case, one value for each round."""


def answers(command: Sequence[str], asked: Sequence[str], cores: set[int]) -> dict[str, float]:
    """The value of each case from a process of an engine; none if it fails, and why on stderr."""

    def begin() -> None:
        die_with_parent()
        os.sched_setaffinity(0, cores)

    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": f"{len(cores)}"}
    line = [*command, "--threads", f"{len(cores)}", *asked]
    try:
        ran = subprocess.run(
            line, capture_output=True, text=True, timeout=_LONGEST_S, preexec_fn=begin, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        sys.stderr.write(f"  took longer than {_LONGEST_S:g} s\n")
        return {}
    if ran.returncode:
        sys.stderr.write(f"  failed: {ran.stderr.strip().splitlines()[-1:]}\n")
    found = [json.loads(text) for text in ran.stdout.splitlines() if text.startswith('{"case"')]
    return {} if ran.returncode else {each["case"]: each["value"] for each in found}


def measured(flags: argparse.Namespace, rows: Sequence[Row], asked: Sequence[str]) -> Values:
    """All rows whose files are there, in turns; the order is turned around in each round."""
    found = defaultdict[str, dict[str, list[float]]](lambda: defaultdict(list))
    peers, cores = peers_of(flags), {int(core) for core in flags.cores.split(",")}
    rows = [row for row in rows if row.subject(flags.model, flags.files).exists()]
    for round_ in range(flags.rounds):
        for row in rows if round_ % 2 == 0 else rows[::-1]:
            sys.stderr.write(f"round {round_ + 1} of {flags.rounds}: {row.name}\n")
            command = peers.command(row, row.subject(flags.model, flags.files))
            for case, value in answers(command, asked, cores).items():
                found[row.name][case].append(value)
    return {row.name: found[row.name] for row in rows if row.name in found}


def steps(flags: argparse.Namespace) -> None:
    asked = ["--prompts", *map(str, flags.prompts), "--steps", *(f"{batch}x{flags.context}" for batch in flags.batches)]
    for bits in flags.bits:
        found = measured(flags, rows_of(bits, flags.only, peers_of(flags)), asked)
        report(f"{kind_of(flags, bits)}, {cores_of(flags)}", step_cells(found), found, flags.to)


def perplexity(flags: argparse.Namespace) -> None:
    text = write_text(flags.model, flags.files, flags.windows)
    for bits in flags.bits:
        found = measured(flags, rows_of(bits, flags.only, peers_of(flags)), ["--text", str(text)])
        cells = {name: {flags.name or flags.model.name: f"{of[PERPLEXITY][0]:.3f}"} for name, of in found.items()}
        report("perplexity", cells, found, flags.to)


def step_cells(found: Values) -> Cells:
    """Milliseconds, tokens a second, and in brackets the time over the first row's: of medians, and its range."""
    base = next(iter(found.values()), {})
    return {name: {_head(case): _cell(case, base.get(case, ()), of[case]) for case in of} for name, of in found.items()}


def _head(case: str) -> str:
    batch, _, context = case.partition("x")
    return f"decode step, batch {batch}, context {context}" if context else f"prompt of {int(case):,}"


def _cell(case: str, base_s: Sequence[float], taken_s: Sequence[float]) -> str:
    num_tokens, middle_s = int(case.partition("x")[0]), statistics.median(taken_s)
    told = f"{number(1000 * middle_s)} ms, {whole(num_tokens / middle_s)}/s"
    if base_s is taken_s or len(base_s) != len(taken_s):
        return told
    ratio = paired_ratio(taken_s, base_s)
    ends = f"; {span((ratio.low, ratio.high), rate)}" if len(base_s) > 1 else ""
    return f"{told} ({rate(ratio.of_medians)}{ends})"


def write_text(model: Path, files: Path, num_windows: int) -> Path:
    """The windows of token ids, and the text they are of beside them, with some more so that none is cut short."""
    text = "\n".join(topics[name] for name in sorted(topics))
    ids = Tokenizer.from_folder(model).encode(text)[: num_windows * _WINDOW]
    path = files / model.name / "text.json"
    path.write_text(json.dumps([ids[first : first + _WINDOW] for first in range(0, len(ids), _WINDOW)]))
    path.with_suffix(".txt").write_text(text[: 8 * len(ids)])
    return path


def peers_of(flags: argparse.Namespace) -> Peers:
    return Peers(flags.llama_cpp, flags.openvino, flags.vllm)


def kind_of(flags: argparse.Namespace, bits: str) -> str:
    return f"{flags.name or flags.model.name}, {bits}{' bits' if bits.isdigit() else ''}"


def cores_of(flags: argparse.Namespace) -> str:
    return "one core" if "," not in flags.cores else "both cores"


def parser_of() -> argparse.ArgumentParser:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m tests.peers.trial", description=__doc__, formatter_class=form)
    parser.add_argument("trial", choices=("steps", "perplexity"))
    parser.add_argument("--model", type=Path, required=True, help="a checkpoint folder")
    parser.add_argument("--files", type=Path, required=True, help="folder of the files of other engines")
    parser.add_argument("--name", default="", help=f"of the model in tables ({NONE}: its folder's)")
    parser.add_argument("--llama-cpp", type=Path, metavar="FOLDER", help="of llama.cpp's programs")
    parser.add_argument("--openvino", default="", metavar="PYTHON", help="that has openvino")
    parser.add_argument("--vllm", default="", metavar="COMMAND", help="that ends with a Python that has vLLM")
    parser.add_argument("--bits", nargs="+", choices=ROWS, default=("4", "8"))
    parser.add_argument("--only", nargs="+", default=(), metavar="PART", help="rows with such a part in their names")
    parser.add_argument("--cores", default="0,1")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--prompts", type=int, nargs="*", default=(512, 2048))
    parser.add_argument("--batches", type=int, nargs="*", default=(1, 8))
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--windows", type=int, default=16, help="of 512 tokens, for the perplexity")
    add_to(parser)
    return parser


def main() -> None:
    """Run what is named."""
    flags = parser_of().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no process is left
    {"steps": steps, "perplexity": perplexity}[flags.trial](flags)


if __name__ == "__main__":
    main()
