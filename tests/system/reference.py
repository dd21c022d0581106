"""What the tokens should be: transformers, greedy, float32, one thread, computed once per prompt."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

NUM_ORDINARY_IDS = 317
"""The vocabulary of `make_checkpoint` without its special tokens."""
LOGPROB_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Expected:
    """Greedy tokens of one prompt and the natural logarithm of each one's probability."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    def first(self, num_tokens: int) -> Expected:
        """The beginning."""
        return Expected(self.token_ids[:num_tokens], self.logprobs[:num_tokens])


class Reference:
    """The same checkpoint in transformers."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        torch.set_num_threads(1)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self._known: dict[tuple[int, ...], Expected] = {}

    def greedy(self, prompt: tuple[int, ...], num_tokens: int = 24, guess: tuple[int, ...] = ()) -> Expected:
        """The first `num_tokens` tokens after `prompt`, as if there were no end-of-sequence token. They are known at
        once where `guess` is right, and else computed one at a time."""
        known = self._known.get(prompt)
        if known is None or len(known.token_ids) < num_tokens:
            known = self._likeliest(prompt, guess)
            if len(guess) != num_tokens or known.token_ids != guess:
                known = self._generate(prompt, num_tokens)
            self._known[prompt] = known
        return known.first(num_tokens)

    def prompt_logprobs(self, prompt: tuple[int, ...]) -> list[float]:
        """The log probability of each token of `prompt` but the first."""
        with torch.inference_mode():
            logprobs = torch.log_softmax(self._model(torch.tensor([prompt])).logits[0].float(), dim=-1)
        return logprobs[range(len(prompt) - 1), list(prompt[1:])].tolist()

    def _likeliest(self, prompt: tuple[int, ...], output: tuple[int, ...]) -> Expected:
        """The likeliest token at each place of `output`, after `prompt` and what `output` has before that place."""
        with torch.inference_mode():
            logits = self._model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1].float()
        logprobs, token_ids = torch.log_softmax(logits, dim=-1).max(dim=-1)
        return Expected(tuple(token_ids.tolist()), tuple(logprobs.tolist()))

    def _generate(self, prompt: tuple[int, ...], num_tokens: int) -> Expected:
        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=num_tokens,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        self._model.generation_config = config
        input_ids = torch.tensor([prompt])
        with torch.inference_mode():
            output = self._model.generate(
                input_ids=input_ids, attention_mask=torch.ones_like(input_ids), generation_config=config
            )
        token_ids = tuple(output.sequences[0, len(prompt) :].tolist())
        logprobs = torch.log_softmax(torch.cat(output.logits).float(), dim=-1)
        return Expected(token_ids, tuple(logprobs[range(num_tokens), list(token_ids)].tolist()))


def make_prompt(length: int, seed: int) -> tuple[int, ...]:
    """Random ordinary token ids; prompts of other lengths or seeds share no beginning."""
    source = random.Random(f"{length}:{seed}")
    return tuple(source.randrange(NUM_ORDINARY_IDS) for _ in range(length))
