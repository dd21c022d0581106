"""What quantization costs on real text: `python -m tests.engine.models.perplexity CHECKPOINT [FILE.gguf]`.

Prints a table for docs/models.md. Each kind of weights is compared with two models in float32: with its dequantized
reference, whose weights are the same codes times the same scales, and with the checkpoint as it is. The first says
whether products are computed right, the second what quantizing costs. The text is Python's own help on statements,
4 times 512 tokens.

A checkpoint that was made from a quantized file lies on that file's grid, where a method with the same groups finds its
codes again. So int4 is measured once more with the inputs of each product in random order, where groups are others.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor

from baton.device.host import HostDevice, HostStaging
from baton.engine.attention.base import Attention, SequenceShare
from baton.engine.attention.choose import AttentionShape, choose_attention
from baton.engine.models.checkpoint import resolve_checkpoint
from baton.engine.models.config import load_config
from baton.engine.models.decoder import Decoder
from baton.engine.models.linear_weights import LoadedWeight, PlainWeight, QuantizedWeight
from baton.engine.models.loading import load_weights
from baton.engine.models.ops.choose import choose_ops
from baton.engine.models.quantization.base import Quantization
from baton.engine.models.quantization.choose import choose_quantization
from baton.engine.models.quantization.while_loading import Int4
from baton.engine.native.library import AUTO, TORCH, Kernels, open_kernels
from baton.engine.runner.kv_memory import allocate_private, host_kv_memory
from baton.engine.text.tokenizer import Tokenizer
from baton.wire.layout import FP8_E4M3, KvLayout
from tests.engine.models.dense_attention import DenseAttention
from tests.engine.models.rounded_kv import RoundedAttention

NUM_SEQUENCES, LENGTH, BLOCK_SIZE = 4, 512, 16
HEADER = (
    "| weights | perplexity | of its dequantized reference | divergence from the checkpoint (nats a token) "
    "| same best token |\n|---|---|---|---|---|\n"
)


class Dequantized:
    """What another method quantizes or reads, as plain float32. See `Quantization`."""

    def __init__(self, method: Quantization) -> None:
        self.name, self.is_published = method.name, method.is_published
        self.unread, self.held_bytes, self._method = method.unread, method.held_bytes, method

    def quantized(self, weight: LoadedWeight) -> LoadedWeight:
        found = self._method.quantized(weight)
        return PlainWeight(found.plain(torch.float32)) if isinstance(found, QuantizedWeight) else found


class Regrouped(Int4):
    """int4, where the inputs of a group are not neighbours."""

    def quantized(self, weight: LoadedWeight) -> LoadedWeight:
        if not isinstance(weight, PlainWeight):
            return weight
        num_in = weight.matrix.shape[1]
        order = torch.randperm(num_in, generator=torch.Generator().manual_seed(num_in))
        found = super().quantized(PlainWeight(weight.matrix[:, order]))
        return replace(found, input_order=order) if isinstance(found, QuantizedWeight) else weight


@dataclass(frozen=True)
class Kind:
    """`method` None: as the checkpoint in `folder` has its weights. `kv_dtype`: of a pool of KV, "" for attention that
    needs none. `rounds`: products with quantized weights round what they multiply; those of the reference do not."""

    name: str
    folder: Path
    setting: str = AUTO
    method: Quantization | None = None
    kv_dtype: str = ""
    rounds: bool = False

    def quantization(self) -> Quantization:
        return self.method or choose_quantization(self.setting, load_config(self.folder), self.folder)


def token_ids(folder: Path, num_sequences: int = NUM_SEQUENCES, length: int = LENGTH) -> Tensor:
    text = "\n".join(topics[name] for name in ("compound", "assignment", "function", "class", "import", "typesmapping"))
    return torch.tensor(Tokenizer.from_folder(folder).encode(text)[: num_sequences * length]).view(-1, length)


@torch.inference_mode()
def log_probabilities(
    folder: Path,
    dtype: torch.dtype,
    quantization: Quantization,
    kernels: str,
    ids: Tensor,
    kv_dtype: str = "",
    *,
    rounds: bool = False,
) -> Tensor:
    """[sequences, length, V]. With `kv_dtype` attention is that of a node; the reference (without kernels) rounds keys
    and values in the same way."""
    config, opened = load_config(folder), open_kernels(kernels, torch.get_num_threads())
    ops = choose_ops(torch.device("cpu"), opened, rounds_activations=rounds)
    decoder = Decoder(config, dtype, "cpu", ops, quantization=quantization)
    load_weights(folder, decoder)
    length = ids.shape[1]
    dense = RoundedAttention if kv_dtype else DenseAttention
    attention: Attention = dense([length], config.windows)
    if kv_dtype and kernels == AUTO:
        attention = paged_attention(decoder, opened, length, kv_dtype)
    positions, found = torch.arange(length), []
    for sequence in ids:
        hidden = decoder.forward(sequence, positions, attention)
        found.append(decoder.logits(hidden).log_softmax(-1))
    return torch.stack(found)


def paged_attention(decoder: Decoder, kernels: Kernels | None, length: int, kv_dtype: str) -> Attention:
    """Over a pool that holds one sequence."""
    blocks = range(-(-length // BLOCK_SIZE))
    layout = KvLayout.of_layers(kv_dtype, BLOCK_SIZE, decoder.layer_kvs)
    shape = AttentionShape(decoder.num_heads, decoder.dtype, layout, len(blocks), 0, decoder.layer_rules)
    choice = choose_attention(AUTO, HostDevice(), shape, kernels)
    attention = choice.build(host_kv_memory(layout, len(blocks), allocate_private).paged)
    attention.plan([SequenceShare(0, length, blocks)], HostStaging())
    return attention


def perplexity(found: Tensor, ids: Tensor) -> float:
    return float(torch.exp(-found[:, :-1].gather(2, ids[:, 1:, None]).mean()))


def both(kind: Kind, dtype: torch.dtype, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The log probabilities of a kind, and those of its dequantized reference."""
    method = kind.quantization()
    found = log_probabilities(kind.folder, dtype, method, AUTO, ids, kind.kv_dtype, rounds=kind.rounds)
    reference = Dequantized(kind.quantization())
    return found, log_probabilities(kind.folder, torch.float32, reference, TORCH, ids, kind.kv_dtype)


def rows(folder: Path, gguf: Path | None) -> Iterator[str]:
    kinds = [Kind("bfloat16", folder), Kind("bfloat16, `--kv-cache-dtype fp8`", folder, kv_dtype=FP8_E4M3)]
    kinds += [Kind(f"bfloat16, `--quantization {setting}`", folder, setting) for setting in ("int8", "int4")]
    kinds += [
        Kind(f"bfloat16, `--quantization {setting} --activation-dtype int8`", folder, setting, rounds=True)
        for setting in ("int8", "int4")
    ]
    kinds.append(Kind("the same `int4`, other groups", folder, method=Regrouped()))
    kinds += [Kind(f"bfloat16, `{gguf.name}`", resolve_checkpoint(str(gguf)))] if gguf else []
    ids = token_ids(folder)
    exact: Tensor | None = None
    for kind in kinds:
        found, reference = both(kind, torch.bfloat16, ids)
        exact = reference if exact is None else exact
        divergence = (exact.exp() * (exact - found)).sum(-1)[:, :-1].mean()
        same = (found.argmax(-1) == exact.argmax(-1)).float().mean()
        of_both = perplexity(found, ids), perplexity(reference, ids)
        yield (
            f"| {kind.name} | {of_both[0]:.3f} | {of_both[1]:.3f} ({of_both[0] / of_both[1] - 1:+.2%}) "
            f"| {divergence:.4f} | {same:.1%} |"
        )


def main() -> None:
    checkpoint, *more = (Path(argument) for argument in sys.argv[1:])
    sys.stdout.write(HEADER)
    for row in rows(checkpoint, more[0] if more else None):
        sys.stdout.write(f"{row}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
