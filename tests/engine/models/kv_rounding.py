"""`python -m tests.engine.models.kv_rounding [--prompts N]`: how far KV in 8 bits is from transformers over KV that is
rounded in the same way, for random models of several families in float32.

Both round the same numbers, but a key that lies in the middle between two codes may get either of them.
"""

from __future__ import annotations

import tempfile
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import PreTrainedModel

from baton.engine.build import Engine
from tests.engine.models.families import VOCAB_SIZE, make_model
from tests.engine.models.rounded_kv import rounding
from tests.engine.models.test_families import answers, built

_FAMILIES = ("qwen3", "llama", "gemma2", "gpt-oss", "gpt2")
_PROMPT_TOKENS = (8, 80)


def differences(model: PreTrainedModel, engine: Engine, num_prompts: int) -> Iterator[float]:
    """Of the log probability of each token that the engine generates behind random prompts."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(num_prompts):
        length = int(torch.randint(*_PROMPT_TOKENS, (), generator=generator))
        (answer,) = answers(engine, torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist())
        ids = [token.token_id for token in answer.tokens]
        with rounding(model), torch.inference_mode():
            logits = model(torch.tensor([[*answer.prompt, *ids[:-1]]])).logits[0, -len(ids) :].float()
        for row, token in zip(torch.log_softmax(logits, dim=-1), answer.tokens, strict=True):
            assert token.logprobs is not None
            yield abs(token.logprobs.logprob - row[token.token_id].item())


def main() -> None:
    """Print a line for each family."""
    parser = ArgumentParser(prog="python -m tests.engine.models.kv_rounding", description=__doc__)
    parser.add_argument("--prompts", type=int, default=100)
    options = parser.parse_args()
    for family in _FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            model, engine = make_model(Path(folder), family), built(Path(folder), kv_cache_dtype="fp8")
            found = torch.tensor(list(differences(model, engine, options.prompts)))
        above = (found > 1e-4).float().mean().item()
        print(f"{family}: median {found.median():.1e}, above 1e-4 {above:.1%}, largest {found.max():.1e}")  # noqa: T201


if __name__ == "__main__":
    main()
