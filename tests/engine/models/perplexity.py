"""What quantization costs on real text: `python -m tests.engine.models.perplexity CHECKPOINT [FILE.gguf]`.

Prints a table for docs/models.md: perplexity of a fixed text, and how far the distributions of next tokens are from
those of the same checkpoint in float32. The text is Python's own help on statements, 4 times 512 tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor

from engine.models.checkpoint import resolve_checkpoint
from engine.models.config import load_config
from engine.models.decoder import Decoder
from engine.models.loading import load_weights
from engine.models.ops.choose import choose_ops
from engine.models.quantization.choose import choose_quantization
from engine.native.library import AUTO, open_kernels
from engine.text.tokenizer import Tokenizer
from tests.engine.models.dense_attention import DenseAttention

NUM_SEQUENCES, LENGTH = 4, 512


def token_ids(folder: Path) -> Tensor:
    text = "\n".join(topics[name] for name in ("compound", "assignment", "function", "class", "import", "typesmapping"))
    return torch.tensor(Tokenizer.from_folder(folder).encode(text)[: NUM_SEQUENCES * LENGTH]).view(-1, LENGTH)


@torch.inference_mode()
def log_probabilities(folder: Path, dtype: torch.dtype, setting: str, ids: Tensor) -> Tensor:
    """[sequences, LENGTH, V]."""
    config = load_config(folder)
    quantization = choose_quantization(setting, config, folder)
    kernels = open_kernels(AUTO, torch.get_num_threads())
    decoder = Decoder(config, dtype, "cpu", choose_ops(torch.device("cpu"), kernels), quantization=quantization)
    load_weights(folder, decoder)
    positions, found = torch.arange(LENGTH), []
    for sequence in ids:
        hidden = decoder.forward(sequence, positions, DenseAttention([LENGTH], config.windows))
        found.append(decoder.logits(hidden).log_softmax(-1))
    return torch.stack(found)


def rows(folder: Path, gguf: Path | None) -> Iterator[str]:
    ids = token_ids(folder)
    exact = log_probabilities(folder, torch.float32, AUTO, ids)
    cases = [("float32", folder, torch.float32, AUTO), ("bfloat16", folder, torch.bfloat16, AUTO)]
    cases += [
        (f"bfloat16, `--quantization {setting}`", folder, torch.bfloat16, setting) for setting in ("int8", "int4")
    ]
    cases += [(f"bfloat16, `{gguf.name}`", resolve_checkpoint(str(gguf)), torch.bfloat16, AUTO)] if gguf else []
    for name, model, dtype, setting in cases:
        found = exact if dtype == torch.float32 else log_probabilities(model, dtype, setting, ids)
        chosen = found[:, :-1].gather(2, ids[:, 1:, None])
        divergence = (exact.exp() * (exact - found)).sum(-1)[:, :-1].mean()
        same = (found.argmax(-1) == exact.argmax(-1)).float().mean()
        yield f"| {name} | {torch.exp(-chosen.mean()):.3f} | {divergence:.4f} | {same:.1%} |"


def main() -> None:
    checkpoint, *more = (Path(argument) for argument in sys.argv[1:])
    sys.stdout.write("| weights | perplexity | divergence (nats a token) | same best token |\n|---|---|---|---|\n")
    for row in rows(checkpoint, more[0] if more else None):
        sys.stdout.write(f"{row}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
