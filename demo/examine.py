"""Examines a demo checkpoint: its answers, and how many sums it gets right, seen in training or not.

    python -m demo.examine demo/checkpoint --num-sums 200 "What is 2+2?" "Tell me a story about a fox."

Decodes greedily with transformers, the reference; knows nothing of Baton's own engine.
"""

# ruff: noqa: T201 (a command that prints its findings)
from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from demo.location import checkpoint_path
from demo.sums import answer, is_held_out

BATCH = 50


@dataclass(frozen=True)
class Sum:
    """One sum and whether the training texts left it out."""

    first: int
    sign: str
    second: int
    held_out: bool


class Examinee:
    """A loaded checkpoint that answers single questions greedily."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        """Load the checkpoint in `folder` with weights of `dtype`."""
        self._tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
        self._tokenizer.padding_side = "left"
        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    def answers(self, questions: list[str], max_tokens: int) -> list[str]:
        """Return the answer to each question, each a chat of its own, cut at `max_tokens`."""
        chats = [[{"role": "user", "content": question}] for question in questions]
        prompts = self._tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
        batch = self._tokenizer(prompts, return_tensors="pt", padding=True)
        with torch.inference_mode():
            ids = self._model.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                max_new_tokens=max_tokens,
                do_sample=False,
            )
        new_ids = ids[:, batch["input_ids"].shape[1] :]
        return [str(text) for text in self._tokenizer.batch_decode(new_ids, skip_special_tokens=True)]


def all_sums() -> Iterator[Sum]:
    """Yield every sum of the small world once."""
    for sign, top in (("+", 100), ("-", 100), ("*", 11)):
        for first in range(top):
            for second in range(top):
                # Questions like "what is twice 26?" are written for every number: doubles prove nothing.
                if first != second or not is_held_out(first, sign, second):
                    yield Sum(first, sign, second, is_held_out(first, sign, second))


def share_right(examinee: Examinee, sums: list[Sum]) -> float:
    """Return the share of sums whose answer is exactly right."""
    right = 0
    for start in range(0, len(sums), BATCH):
        part = sums[start : start + BATCH]
        questions = [f"What is {item.first} {item.sign} {item.second}?" for item in part]
        found = examinee.answers(questions, max_tokens=24)
        right += sum(text == answer(item.first, item.sign, item.second) for text, item in zip(found, part, strict=True))
    return right / len(sums)


def main() -> None:
    """Read the command line, print the shares and the answers."""
    parser = argparse.ArgumentParser(description="Examine a demo checkpoint.")
    parser.add_argument("folder", type=Path, nargs="?", default=checkpoint_path(), help="the checkpoint")
    parser.add_argument("questions", nargs="*", help="questions to answer")
    parser.add_argument("--num-sums", type=int, default=200, help="sums of each kind, 0 for none")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32")
    options = parser.parse_args()
    examinee = Examinee(options.folder, {"bfloat16": torch.bfloat16, "float32": torch.float32}[options.dtype])
    for question in options.questions:
        print(f"> {question}\n{examinee.answers([question], max_tokens=300)[0]}\n")
    if options.num_sums == 0:
        return
    for sign in "+-*":
        for held_out in (False, True):
            sums = [item for item in all_sums() if item.sign == sign and item.held_out == held_out]
            if not sums:
                continue
            picked = random.Random(0).sample(sums, min(options.num_sums, len(sums)))
            kind = "never seen in training" if held_out else "seen"
            print(f"a {sign} b, {kind}: {share_right(examinee, picked):.1%} of {len(picked)}")


if __name__ == "__main__":
    main()
