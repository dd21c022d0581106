"""Examines a demo checkpoint: its answers, and how much it gets right of sums, facts, calls, JSON and thoughts.

    python -m baton.demo.training.examine baton/demo/checkpoint "What is 2+2?" "Tell me a story about a fox." --num-sums
    200

Sums are told apart by whether training has seen them. The other questions are new draws of the generators of its texts,
and an answer is right when it is the same to the letter; some questions have several good answers, of which it is one.

Decodes greedily with transformers, the reference; knows nothing of Baton's own engine.
"""

# ruff: noqa: T201 (a command that prints its findings)
from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from baton.demo.location import checkpoint_path
from baton.demo.training import facts, records, smalltalk, sums, thoughts, unknown
from baton.demo.training.agents import THINK, THINK_END, TOOL_CALL, TOOL_RESPONSE, agent_texts
from baton.demo.training.corpus import Message
from baton.demo.training.sums import answer, is_held_out

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
        return self.continued(
            self._tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True), max_tokens
        )

    def continued(self, prompts: list[str], max_tokens: int) -> list[str]:
        """Return what follows each prompt, cut at `max_tokens`."""
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


@dataclass(frozen=True)
class Item:
    """A prompt and what should follow."""

    prompt: str
    expected: str


def known_items(rng: random.Random) -> Iterator[Item]:
    """Yield single questions without end, of the kinds that the first texts have."""
    while True:
        kinds = (facts.exchange, smalltalk.exchange, sums.exchange, unknown.exchange)
        question, expected = rng.choice(kinds)(rng)
        # there are several ways to go on after it
        expected = unknown.ADMISSION if expected.startswith(unknown.ADMISSION) else expected
        yield Item(_prompt(({"role": "user", "content": question},)), expected)


def agent_items(rng: random.Random, *, calls: bool) -> Iterator[Item]:
    """Yield chats with tools without end, of which the next message is a call, or else is what follows a result."""
    for text in agent_texts(rng.randrange(2**30)):
        for number, message in enumerate(text.messages):
            is_call = message["content"].startswith(TOOL_CALL)
            has_result = number > 0 and text.messages[number - 1]["content"].startswith(TOOL_RESPONSE)
            if message["role"] == "assistant" and "given" not in message and is_call == calls and is_call | has_result:
                yield Item(_prompt(text.messages[:number]), message["content"])


def json_items(rng: random.Random) -> Iterator[Item]:
    """Yield records without end, written up to one of their values, as a grammar has them."""
    while True:
        record = records.record(rng)
        names = list(record.values)
        asked = rng.randrange(len(names))
        before = {name: record.values[name] for name in names[:asked]}
        begun = json.dumps(before, ensure_ascii=False)[:-1] + (", " if before else "")
        value = json.dumps(record.values[names[asked]], ensure_ascii=False)
        prompt = _prompt(({"role": "user", "content": record.said},), f'{begun}"{names[asked]}":')
        yield Item(prompt, f" {value}")


def thought_items(rng: random.Random) -> Iterator[Item]:
    """Yield sums of up to three digits without end, to be thought about."""
    while True:
        question, answer_to_it = thoughts.long_sum(rng)
        expected = f"{thoughts.thought(answer_to_it)}\n{THINK_END}\n\n{answer_to_it}"
        yield Item(_prompt(({"role": "user", "content": question},), f"{THINK}\n"), expected)


def _prompt(messages: Sequence[Message], given: str = "") -> str:
    """The text that the chat template makes of these messages, and the beginning of the answer."""
    turns = "".join(f"<|im_start|>{each['role']}\n{each['content']}<|im_end|>\n" for each in messages)
    return f"{turns}<|im_start|>assistant\n{given}"


def share_of(examinee: Examinee, items: list[Item]) -> float:
    """Return the share of items that are continued as expected."""
    right = 0
    items = sorted(items, key=lambda item: len(item.prompt))
    for start in range(0, len(items), BATCH):
        part = items[start : start + BATCH]
        found = examinee.continued([item.prompt for item in part], max_tokens=120)
        right += sum(text.startswith(item.expected) for text, item in zip(found, part, strict=True))
    return right / len(items)


def main() -> None:
    """Read the command line, print the shares and the answers."""
    parser = argparse.ArgumentParser(description="Examine a demo checkpoint.")
    parser.add_argument("folder", type=Path, nargs="?", default=checkpoint_path(), help="the checkpoint")
    parser.add_argument("questions", nargs="*", help="questions to answer")
    parser.add_argument("--num-sums", type=int, default=200, help="sums of each kind, 0 for none")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32")
    parser.add_argument("--num-others", type=int, default=200, help="questions of each other kind, 0 for none")
    options = parser.parse_args()
    examinee = Examinee(options.folder, {"bfloat16": torch.bfloat16, "float32": torch.float32}[options.dtype])
    for question in options.questions:
        print(f"> {question}\n{examinee.answers([question], max_tokens=300)[0]}\n")
    others = {
        "what it has always known": known_items(random.Random(1)),
        "calls of tools": agent_items(random.Random(2), calls=True),
        "what follows a result": agent_items(random.Random(3), calls=False),
        "values in JSON": json_items(random.Random(4)),
        "thoughts about sums up to 999": thought_items(random.Random(5)),
    }
    for name, items in others.items():
        if options.num_others:
            print(f"{name}: {share_of(examinee, list(islice(items, options.num_others))):.1%} of {options.num_others}")
    for sign in "+-*" if options.num_sums else "":
        for held_out in (False, True):
            sums = [item for item in all_sums() if item.sign == sign and item.held_out == held_out]
            if not sums:
                continue
            picked = random.Random(0).sample(sums, min(options.num_sums, len(sums)))
            kind = "never seen in training" if held_out else "seen"
            print(f"a {sign} b, {kind}: {share_right(examinee, picked):.1%} of {len(picked)}")


if __name__ == "__main__":
    main()
