"""Settings of `python -m bench.gpu_check`."""

from __future__ import annotations

from dataclasses import dataclass

from bench.output_file import require_folder
from program.settings import setting

CUDA, CPU = "cuda", "cpu"


@dataclass(frozen=True, slots=True)
class GpuCheckSettings:
    """Settings of `python -m bench.gpu_check`."""

    only: str = setting("", "run only these groups, for example attention,graphs; empty: all")
    device: str = setting(
        CUDA, "what to check; cpu: the same code with tiny sizes, speeds mean nothing", choices=(CUDA, CPU)
    )
    quick: bool = setting(False, "fewer cases and rounds")
    strict: bool = setting(False, "exit with 1 for a missed target too")
    json: str = setting("", "file for the table, the machine and the versions")

    def check(self) -> None:
        """Raise `InvalidSetting` when the results could not be written: before anything is measured."""
        require_folder(self.json)
