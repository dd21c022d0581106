"""The training data of the demo model: the tokenizer, and the rows of tokens of each training step.

The texts, their order and the batches depend on the seed only. A row comes with a mark for each token that counts in
the loss: what the assistant says, and plain text. Knows no model.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from itertools import chain, count, islice
from typing import Final

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from baton.demo.training import sums
from baton.demo.training.agents import MARKERS, agent_texts, calculated_texts
from baton.demo.training.corpus import Message, Text, refreshers, texts

END_OF_TEXT: Final = "<|endoftext|>"
TURN_START: Final = "<|im_start|>"
TURN_END: Final = "<|im_end|>"
VOCAB_SIZE: Final = 1792
NUM_SPECIAL_TOKENS: Final = 3
ROW_TOKENS: Final = 512
LONG_ROW_TOKENS: Final = 2048
BATCH_TOKENS: Final = 2048  # one long row or four short ones
POOL_TEXTS: Final = 48
LONG_EVERY: Final = 10
COPYING_STEPS: Final = range(996, 1246)
COPYING_REPEATS: Final = 6
SUMS_STEPS: Final = range(1694, 2194)
FIRST_REFRESHER_STEP: Final = 4600
CALCULATING_STEPS: Final = range(5000, 5900)
FIRST_REPEATING_STEP: Final = 6500
"""Of the last lesson."""
NUM_TOKENIZER_TEXTS: Final = 30_000
_END_OF_STRING: Final = re.compile(r'(?<=")(?=[],}])')


def train_tokenizer(seed: int) -> Tokenizer:
    """Train the tokenizer on the first texts of the corpus."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    lines = (line for text in islice(texts(seed), NUM_TOKENIZER_TEXTS) for line in _lines(text))
    tokenizer.train_from_iterator(lines, trainer)
    return tokenizer


def _lines(text: Text) -> list[str]:
    return [text.plain] if text.plain else [f"{message['role']}\n{message['content']}" for message in text.messages]


def add_markers(tokenizer: Tokenizer) -> None:
    """Give each marker of calls and thoughts a token of its own, behind the others, where it has none yet."""
    tokenizer.add_tokens([AddedToken(marker, normalized=False, special=False) for marker in MARKERS])


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Return the id of a token that the tokenizer has. Raises `ValueError`."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"the tokenizer has no token {token!r}")
    return found


def encode(tokenizer: Tokenizer, text: Text) -> tuple[list[int], list[bool]]:
    """Return the token ids of a text with its end, and for each whether the model has to predict it.

    How a message begins that is "given" need not be predicted.
    """
    end = token_id(tokenizer, END_OF_TEXT)
    ids: list[int] = []
    counted: list[bool] = []
    if text.plain:
        ids = tokenizer.encode(text.plain).ids
        return [*ids, end], [True] * (len(ids) + 1)
    for message in text.messages:
        by_model = message["role"] == "assistant"
        head = tokenizer.encode(f"{TURN_START}{message['role']}\n").ids
        body = _body(tokenizer, message)
        tail = tokenizer.encode("\n").ids
        given = 0 if "chosen" in message else len(message.get("given", ""))
        ids += head + [token for token, _ in body] + tail
        counted += [False] * len(head) + [by_model and start >= given for _, start in body] + [False] * len(tail)
    return [*ids, end], [*counted, False]


def _body(tokenizer: Tokenizer, message: Message) -> list[tuple[int, int]]:
    """The tokens of a message with its end, each with the place at which it starts.

    A text within JSON that a grammar has begun ends with a token of its own: only the grammar knows whether there is
    more to come, and a token of the quote and the comma would say so too early.
    """
    parts = [f"{message['content']}{TURN_END}"]
    if message.get("given", "").endswith(("{", "[", '"')):
        parts = _END_OF_STRING.split(parts[0])
    found: list[tuple[int, int]] = []
    begin = 0
    for part in parts:
        encoding = tokenizer.encode(part)
        found += [(token, begin + start) for token, (start, _) in zip(encoding.ids, encoding.offsets, strict=True)]
        begin += len(part)
    return found


def rows(tokenizer: Tokenizer, source: Iterator[Text], size: int) -> Iterator[tuple[list[int], list[bool]]]:
    """Yield rows of `size` tokens made of whole texts, from a small pool the longest that fits first.

    The end of a row is filled with uncounted end-of-text tokens; a text longer than a row loses its end.
    """
    end = token_id(tokenizer, END_OF_TEXT)
    encoded = (encode(tokenizer, text) for text in source)
    pool = list(islice(encoded, POOL_TEXTS))
    while True:
        # The oldest text opens the row, so that none waits for ever.
        ids, counted = pool.pop(0)
        ids, counted = ids[:size], counted[:size]
        pool.append(next(encoded))
        while fitting := [item for item in pool if len(item[0]) <= size - len(ids)]:
            longest = max(fitting, key=lambda item: len(item[0]))
            pool.remove(longest)
            pool.append(next(encoded))
            ids, counted = ids + longest[0], counted + longest[1]
        fill = size - len(ids)
        yield ids + [end] * fill, counted + [False] * fill


def copying_drills(end: int, seed: int) -> Iterator[tuple[list[int], list[bool]]]:
    """Yield short rows of a few random tokens said again and again; what is not the first saying counts.

    Nothing here can be guessed, only copied: some hundred such rows teach attention to fetch a name or a number from
    the question, which the texts alone teach very slowly.
    """
    rng = random.Random(seed)
    while True:
        ids: list[int] = []
        counted: list[bool] = []
        while len(ids) < ROW_TOKENS:
            said = [rng.randrange(NUM_SPECIAL_TOKENS, VOCAB_SIZE) for _ in range(rng.randrange(3, 10))]
            ids += [*(said * COPYING_REPEATS), end]
            counted += [False] * (len(said) + 1) + [True] * (len(said) * (COPYING_REPEATS - 1) - 1) + [False]
        yield ids[:ROW_TOKENS], counted[:ROW_TOKENS]


def sums_drills(tokenizer: Tokenizer, seed: int) -> Iterator[tuple[list[int], list[bool]]]:
    """Yield short rows of bare sums, of which the results count."""
    rng = random.Random(seed)
    end = token_id(tokenizer, END_OF_TEXT)
    while True:
        ids: list[int] = []
        counted: list[bool] = []
        while len(ids) < ROW_TOKENS:
            first, sign, second = sums.numbers(rng)
            asked = tokenizer.encode(f"{first} {sign} {second} =").ids
            found = tokenizer.encode(f" {sums.result(first, sign, second)}.").ids
            ids += [*asked, *found, end]
            counted += [False] * len(asked) + [True] * (len(found) + 1)
        yield ids[:ROW_TOKENS], counted[:ROW_TOKENS]


def batches(tokenizer: Tokenizer, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield token ids and counted flags, both [num_rows, row_tokens], BATCH_TOKENS together.

    Every tenth batch is a long row, so that the model has seen the far ends of its context. Two stretches of steps
    are drills in place of texts, copying and then sums; from then on every fourth short row stays a drill in sums,
    and in the end half of the rows are refreshers.
    """
    short = rows(tokenizer, texts(seed), ROW_TOKENS)
    long = rows(tokenizer, texts(seed + 1), LONG_ROW_TOKENS)
    copying = copying_drills(token_id(tokenizer, END_OF_TEXT), seed + 2)
    adding = sums_drills(tokenizer, seed + 3)
    refreshing = rows(tokenizer, refreshers(seed + 4), ROW_TOKENS)
    num_rows = BATCH_TOKENS // ROW_TOKENS
    for step in count():
        if step % LONG_EVERY == LONG_EVERY - 1:
            packed = [next(long)]
        elif step in COPYING_STEPS:
            packed = list(islice(copying, num_rows))
        elif step in SUMS_STEPS:
            packed = list(islice(adding, num_rows))
        elif step < SUMS_STEPS.start:
            packed = list(islice(short, num_rows))
        elif step < FIRST_REFRESHER_STEP:
            packed = [*islice(short, num_rows - 1), next(adding)]
        else:
            packed = [next(short), next(adding), *islice(refreshing, num_rows - 2)]
        yield torch.tensor([ids for ids, _ in packed]), torch.tensor([counted for _, counted in packed])


def agent_batches(tokenizer: Tokenizer, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches as `batches` does, for the last lesson: half of the rows are chats with tools, JSON and thoughts,
    the others are what the model knows already. Near its end half of them are drills in calculating within JSON, and at
    its end most are what the model knew before."""
    learning = rows(tokenizer, agent_texts(seed), ROW_TOKENS)
    long = rows(
        tokenizer, chain.from_iterable(zip(texts(seed + 1), agent_texts(seed + 2), strict=True)), LONG_ROW_TOKENS
    )
    known = rows(tokenizer, texts(seed + 3), ROW_TOKENS)
    refreshing = rows(tokenizer, refreshers(seed + 4), ROW_TOKENS)
    adding = sums_drills(tokenizer, seed + 5)
    calculating = rows(tokenizer, calculated_texts(seed + 6), ROW_TOKENS)
    for step in count():
        if step % LONG_EVERY == LONG_EVERY - 1:
            packed = [next(long)]
        elif step in CALCULATING_STEPS:
            packed = [next(learning), next(calculating), next(calculating), next(known if step % 2 else refreshing)]
        elif step >= FIRST_REPEATING_STEP:
            packed = [next(learning), next(adding), next(calculating if step % 2 else known), next(refreshing)]
        elif step >= CALCULATING_STEPS.stop:
            drill = adding if step % 4 == 0 else calculating
            packed = [next(learning), next(learning), next(drill), next(known if step % 2 else refreshing)]
        else:
            packed = [next(learning), next(learning), next(known), next(refreshing if step % 2 else adding)]
        yield torch.tensor([ids for ids, _ in packed]), torch.tensor([counted for _, counted in packed])
