"""A model several times as large as a real one that says almost the same: `... larger_target MODEL OUT --times 7`.

Where no larger model of a vocabulary can be had, this makes a target whose draft model is the real one. Each layer is
followed by copies of itself, of which `--share` of what they add to the residual stream is kept. So all weights are
real, and cost and memory are those of so many layers; the quality is at most that of the real model. Near a share of 0
both models say the same. The larger it is, the more they differ. The last line says how often the real model agrees
with the larger one, token by token, in what that says to the tasks of `tests.system.speculation_work`.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from baton import LLM, SamplingParams
from tests.system.speculation_work import KINDS

_LAYER = re.compile(r"^model\.layers\.(\d+)\.(.*)$")
_ADDS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
"""What a layer adds to the residual stream comes out of these."""
_MAX_TOKENS = 48
_KEPT = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def make_larger(model: Path, out: Path, times: int, share: float) -> None:
    """Write the checkpoint."""
    out.mkdir(parents=True, exist_ok=True)
    for name in _KEPT:
        if (model / name).exists():
            shutil.copy(model / name, out)
    config = json.loads((model / "config.json").read_text())
    config["num_hidden_layers"] *= times
    config.pop("layer_types", None)
    (out / "config.json").write_text(json.dumps(config, indent=2))
    save_file(dict(_tensors(model, times, share)), out / "model.safetensors", metadata={"format": "pt"})


def _tensors(model: Path, times: int, share: float) -> Iterator[tuple[str, torch.Tensor]]:
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                tensor = tensors.get_tensor(name)
                layer = _LAYER.match(name)
                if layer is None:
                    yield name, tensor
                    continue
                for copy in range(times):
                    scale = share if copy and layer[2] in _ADDS else 1.0
                    yield f"model.layers.{int(layer[1]) * times + copy}.{layer[2]}", tensor * scale


def agreement(model: Path, larger: Path, num_tasks: int, num_threads: int) -> float:
    """The share of tokens of the larger model's answers that the model holds for the likeliest there, too."""
    turns = [[{"role": "user", "content": make(n).question}] for n in range(num_tasks) for make in KINDS.values()]
    llm, greedy = LLM(str(larger), num_threads=num_threads), SamplingParams(temperature=0, max_tokens=_MAX_TOKENS)
    said = [llm.chat(turn, greedy) for turn in turns]
    whole = [[*answer.prompt_token_ids, *answer.token_ids] for answer in said]
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    scored = LLM(str(model), num_threads=num_threads).generate(whole, asked)
    ranks = [
        token.rank
        for answer, found in zip(said, scored, strict=True)
        for token in found.prompt_logprobs[-len(answer.token_ids) :]
        if token is not None
    ]
    return sum(rank == 1 for rank in ranks) / len(ranks)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.engine.speculation.larger_target", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--times", type=int, default=7, help="as many layers")
    parser.add_argument("--share", type=float, default=0.05, help="of what copies of layers add")
    parser.add_argument("--tasks", type=int, default=2, help="of each kind, to compare the models by; 0: none")
    parser.add_argument("--num-threads", type=int, default=2)
    asked = parser.parse_args()
    make_larger(asked.model, asked.out, asked.times, asked.share)
    if asked.tasks:
        share = agreement(asked.model, asked.out, asked.tasks, asked.num_threads)
        sys.stdout.write(f"the real model agrees with {share:.1%} of the tokens\n")


if __name__ == "__main__":
    main()
