"""The rows of a table: engines with one way of holding weights, the command of each, and where its file lies.

Owns the layout of the folder that `tests.peers.files` fills. Knows no measurement. An engine whose program is not named
is left out.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

BATON, LLAMA, OPENVINO, VLLM = "Baton", "llama.cpp", "OpenVINO", "vLLM"
_MODULES = {
    BATON: "tests.peers.baton_engine",
    LLAMA: "tests.peers.llama_cpp",
    OPENVINO: "tests.peers.openvino_engine",
    VLLM: "tests.peers.vllm_engine",
}


@dataclass(frozen=True)
class Row:
    """`file`: of the model in the folder of files, "" for the model itself. `settings`: of Baton."""

    engine: str
    weights: str
    file: str = ""
    settings: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.engine} {self.weights}"

    def subject(self, model: Path, files: Path) -> Path:
        """The file or folder that its engine reads."""
        return files / model.name / self.file if self.file else model


ROWS: Mapping[str, Sequence[Row]] = {
    "4": (
        Row(BATON, "int4", settings=("quantization=int4",)),
        Row(BATON, "int4, int8 activations", settings=("quantization=int4", "activation_dtype=int8")),
        Row(BATON, "Q4_0 file", "Q4_0.gguf"),
        Row(BATON, "Q4_K_M file", "Q4_K_M.gguf"),
        Row(BATON, "Q4_K_M file, int8 activations", "Q4_K_M.gguf", ("activation_dtype=int8",)),
        Row(LLAMA, "Q4_0", "Q4_0.gguf"),
        Row(LLAMA, "Q4_K_M", "Q4_K_M.gguf"),
        Row(OPENVINO, "int4, groups of 128", "openvino-int4-sym128"),
        Row(OPENVINO, "int4, groups of 32 with offsets", "openvino-int4-asym32"),
        Row(VLLM, "W4A8, groups of 128", "vllm-w4"),
    ),
    "8": (
        Row(BATON, "int8", settings=("quantization=int8",)),
        Row(BATON, "int8, int8 activations", settings=("quantization=int8", "activation_dtype=int8")),
        Row(BATON, "Q8_0 file", "Q8_0.gguf"),
        Row(LLAMA, "Q8_0", "Q8_0.gguf"),
        Row(OPENVINO, "int8", "openvino-int8"),
        Row(VLLM, "W8A8", "vllm-w8a8"),
    ),
    "experts": (
        Row(BATON, "MXFP4", settings=("load_format=dummy",)),
        Row(BATON, "int4", settings=("load_format=dummy", "quantization=int4")),
        Row(LLAMA, "of the same shapes", "random.gguf"),
    ),
    "16": (Row(BATON, "bfloat16"), Row(LLAMA, "BF16", "bf16.gguf"), Row(VLLM, "bfloat16")),
}
"""By bits of a weight; "experts": mixtures of random weights. Times of the others are held against the first row's."""


@dataclass(frozen=True)
class Peers:
    """Where other engines are: a folder of programs, and the beginnings of commands that end with a Python."""

    llama_cpp: Path | None
    openvino: str
    vllm: str

    def has(self, engine: str) -> bool:
        return bool({BATON: True, LLAMA: self.llama_cpp, OPENVINO: self.openvino, VLLM: self.vllm}[engine])

    def command(self, row: Row, subject: Path) -> list[str]:
        """The process of a row for its file, without what it shall measure."""
        python = {OPENVINO: self.openvino, VLLM: self.vllm}.get(row.engine, sys.executable)
        command = [*shlex.split(python), "-m", _MODULES[row.engine], str(subject)]
        if row.engine == LLAMA:
            command += ["--binaries", str(self.llama_cpp)]
        return [*command, "--set", *row.settings] if row.settings else command


def rows_of(bits: str, names: Sequence[str], peers: Peers) -> list[Row]:
    """Those that are asked for by a part of their names (all if none is), of engines that are here."""
    rows = [row for row in ROWS[bits] if peers.has(row.engine)]
    return [row for row in rows if not names or any(name in row.name for name in names)]
