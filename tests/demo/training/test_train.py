"""What the training counts, who may look at whom, and that a cut-off run goes on where it was."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from baton.demo.location import checkpoint_path
from baton.demo.training.batches import BATCH_TOKENS, END_OF_TEXT, LONG_EVERY, batches, encode, sums_drills
from baton.demo.training.corpus import Text
from baton.demo.training.train import (
    Plan,
    build_model,
    export,
    load_state,
    loss_of,
    optimizers_for,
    rate,
    save_state,
    text_borders,
)

END_ID = 0


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(checkpoint_path() / "tokenizer.json"))


def test_only_what_the_assistant_says_counts_in_a_chat(tokenizer: Tokenizer) -> None:
    chat = Text(({"role": "user", "content": "What is 2+2?"}, {"role": "assistant", "content": "2 + 2 = 4."}))
    ids, counted = encode(tokenizer, chat)
    predicted = [token for token, counts in zip(ids, counted, strict=True) if counts]
    assert tokenizer.decode(predicted, skip_special_tokens=False) == "2 + 2 = 4.<|im_end|>"


def test_training_sees_a_chat_exactly_as_the_template_writes_it(tokenizer: Tokenizer) -> None:
    chat = Text(({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}))
    written = tokenizer.decode(encode(tokenizer, chat)[0], skip_special_tokens=False)
    assert written == ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n<|endoftext|>")


def test_every_batch_has_the_same_number_of_tokens(tokenizer: Tokenizer) -> None:
    for ids, counted in islice(batches(tokenizer, 3), LONG_EVERY):
        assert ids.numel() == counted.numel() == BATCH_TOKENS


def test_results_of_sums_count_and_are_right(tokenizer: Tokenizer) -> None:
    ids, counted = next(sums_drills(tokenizer, 1))
    lines = tokenizer.decode(ids, skip_special_tokens=False).split(END_OF_TEXT)[:-1]
    first, sign, second, equals, result = lines[0].rstrip(".").split()
    expected = {"+": int(first) + int(second), "-": int(first) - int(second), "*": int(first) * int(second)}
    assert equals == "="
    assert int(result) == expected[sign]
    assert counted[: ids.index(END_ID) + 1].count(True) == len(result) + 3


def test_a_text_sees_itself_and_nothing_before_it() -> None:
    borders = text_borders(torch.tensor([[5, 6, END_ID, 7, 8]]), END_ID)[0, 0].int().tolist()
    assert borders == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]


def test_rate_rises_stays_and_falls() -> None:
    assert rate(0, 0.0) < rate(50, 0.01) < rate(500, 0.3) == rate(900, 0.6)
    assert rate(5000, 0.9) > rate(5000, 0.99) > 0


def test_steps_decide_the_end_when_given() -> None:
    assert Plan(minutes=1.0, steps=100).progress(50, 9999.0) == 0.5
    assert Plan(minutes=1.0, steps=None).progress(50, 30.0) == 0.5


def test_a_cut_off_run_goes_on_as_if_it_had_not_been_cut(tokenizer: Tokenizer, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = build_model(tokenizer)
    optimizers = optimizers_for(model)
    data = list(islice(batches(tokenizer, 1), 2))

    def step(trained: torch.nn.Module, steppers: list[torch.optim.Optimizer], number: int) -> None:
        ids, counted = (tensor[:1, :128] for tensor in data[number])
        torch.autograd.backward(loss_of(trained, ids, counted, END_ID))
        for stepper in steppers:
            stepper.step()
        trained.zero_grad()

    step(model, optimizers, 0)
    save_state(tmp_path, model, optimizers, 1, 2.5)
    step(model, optimizers, 1)
    continued = build_model(tokenizer)
    continued_optimizers = optimizers_for(continued)
    assert load_state(tmp_path, continued, continued_optimizers) == (1, 2.5)
    step(continued, continued_optimizers, 1)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(continued.get_parameter(name), weight, msg=name)


def test_export_writes_the_files_of_a_published_checkpoint(tokenizer: Tokenizer, tmp_path: Path) -> None:
    export(build_model(tokenizer), tokenizer, tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
