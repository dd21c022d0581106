"""llama.cpp's prompts, decode steps and perplexity, by its own `llama-batched-bench` and `llama-perplexity`.

    python -m tests.peers.llama_cpp FILE.gguf --threads 2 --prompts 512 --binaries llama.cpp/build/bin

Prompts are measured with flash attention and steps without, each as it was faster here. The perplexity is of the text
beside the token ids (`.txt`), which llama.cpp cuts into the same tokens.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.peers.work import NUM_STEPS, PERPLEXITY, SPARE_TOKENS, Work, say, work_of

_LONGEST_S = 1200.0
_PROMPTS_FLASH_ATTENTION, _STEPS_FLASH_ATTENTION = "on", "off"
_FINAL = re.compile(r"Final estimate: PPL = ([\d.]+)")


@dataclass(frozen=True)
class Programs:
    """Those of llama.cpp in `folder`, for one model."""

    folder: Path
    model: str
    num_threads: int

    def output(self, name: str, *flags: object) -> str:
        """What a program prints, on stdout and on stderr. Raises `CalledProcessError`."""
        command = [str(self.folder / name), "-m", self.model, "-t", f"{self.num_threads}", *map(str, flags)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=_LONGEST_S, check=True)
        return ran.stdout + ran.stderr

    def batched(
        self, prompts: Sequence[int], num_tokens: int, batches: Sequence[int], flash_attention: str
    ) -> list[dict[str, float]]:
        """Lines of `llama-batched-bench`, of each prompt and batch. Sequences get copies of one prompt's KV."""
        lists = [",".join(map(str, each)) for each in (prompts, batches)]
        room = (max(prompts) + SPARE_TOKENS) * (max(batches) + 1)
        same = ("-c", room, "-npp", lists[0], "-ntg", num_tokens, "-npl", lists[1], "-pps", "-no-kvu")
        output = self.output("llama-batched-bench", *same, "-fa", flash_attention, "--output-format", "jsonl")
        return [json.loads(line) for line in output.splitlines() if line.startswith("{")]

    def perplexity(self, text: Path, num_windows: int, window: int) -> float:
        """As llama.cpp has it: over the second half of each window."""
        size = ("-c", window, "-b", window, "--chunks", num_windows)
        output = self.output("llama-perplexity", "-f", text, *size)
        found = _FINAL.search(output)
        if found is None:
            raise ValueError(f"llama-perplexity says no final estimate: {output[-500:]}")
        return float(found[1])


def measure(work: Work, programs: Programs) -> None:
    """Say the value of each case."""
    prompts_s, steps_s = dict[float, list[float]](), dict[str, float]()
    for context in {context for _, context in work.steps}:
        batches = [batch for batch, each in work.steps if each == context]
        for line in programs.batched([context], NUM_STEPS, batches, _STEPS_FLASH_ATTENTION):
            prompts_s.setdefault(context, []).append(line["t_pp"])
            steps_s[f"{line['pl']}x{context}"] = line["t_tg"] / NUM_STEPS
    if work.prompts:
        for line in programs.batched(work.prompts, 1, [1], _PROMPTS_FLASH_ATTENTION):
            prompts_s.setdefault(line["pp"], []).append(line["t_pp"])
    for length in work.prompts:
        say(f"{length}", min(prompts_s[length]))
    for case, step_s in steps_s.items():
        say(case, step_s)
    if work.text is not None:
        windows = work.windows()
        say(PERPLEXITY, programs.perplexity(work.text.with_suffix(".txt"), len(windows), len(windows[0])))


def main() -> None:
    work = work_of(sys.argv[1:])
    parser = argparse.ArgumentParser()
    parser.add_argument("--binaries", type=Path, required=True)
    measure(work, Programs(parser.parse_args(work.rest).binaries, work.model, work.num_threads))


if __name__ == "__main__":
    main()
