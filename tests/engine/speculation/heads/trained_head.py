"""An EAGLE-3 head for the demo model, trained here in about a minute: `python -m
tests.engine.speculation.heads.trained_head FOLDER`.

A measurement of acceptance needs a head that has learned something, and published ones are of models that are not here.
It learns from the texts that the model has learned from: to give each token the chance that the model gives it, also
behind its own states. Then it says how often its first three guesses are the model's likeliest token, in texts that it
has not seen.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from baton.demo.location import checkpoint_path
from baton.demo.training.corpus import Text, texts

_ROW_TOKENS, _NUM_ROWS, _DEPTH = 96, 6, 3
_EPS = 1e-6
_TAPS = (2, 2, 1)
"""The usual layers of a model with four."""


class TrainedHead(torch.nn.Module):
    """The head as it is published, in float32 and without a cache."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        size, vocab_size = model.config.hidden_size, model.config.vocab_size
        self.num_heads, self.head_dim = 4, size // 4
        shapes = {
            "fc": (size, len(_TAPS) * size),
            "midlayer.self_attn.q_proj": (size, 2 * size),
            "midlayer.self_attn.k_proj": (size, 2 * size),
            "midlayer.self_attn.v_proj": (size, 2 * size),
            "midlayer.self_attn.o_proj": (size, size),
            "midlayer.mlp.gate_proj": (2 * size, size),
            "midlayer.mlp.up_proj": (2 * size, size),
            "midlayer.mlp.down_proj": (size, 2 * size),
            "lm_head": (vocab_size, size),
        }
        norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
        weights = {name: torch.randn(shape) / math.sqrt(shape[1]) for name, shape in shapes.items()}
        weights["lm_head"] = model.get_output_embeddings().weight.detach().float().clone()
        weights |= {name: torch.ones(size) for name in norms}
        self.weights = {name: torch.nn.Parameter(weight) for name, weight in weights.items()}
        self.embedding = model.get_input_embeddings().weight.detach().float()

    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        """Those of all tensors."""
        yield from self.weights.values()

    def forward(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """The states [B, T, E] of hidden states [B, T, E] and the token behind each."""
        layer, weights = "midlayer", self.weights
        normed = self._norm(hidden, f"{layer}.hidden_norm")
        both = torch.cat((self._norm(self.embedding[token_ids], f"{layer}.input_layernorm"), normed), dim=-1)
        q, k, v = (
            F.linear(both, weights[f"{layer}.self_attn.{name}_proj"])
            .view(*both.shape[:2], self.num_heads, self.head_dim)
            .transpose(1, 2)
            for name in ("q", "k", "v")
        )
        attended = F.scaled_dot_product_attention(self._rotated(q), self._rotated(k), v, is_causal=True)
        stream = hidden + F.linear(attended.transpose(1, 2).flatten(2), weights[f"{layer}.self_attn.o_proj"])
        x = self._norm(stream, f"{layer}.post_attention_layernorm")
        gate = F.silu(F.linear(x, weights[f"{layer}.mlp.gate_proj"]))
        return stream + F.linear(gate * F.linear(x, weights[f"{layer}.mlp.up_proj"]), weights[f"{layer}.mlp.down_proj"])

    def logits(self, states: Tensor) -> Tensor:
        return F.linear(self._norm(states, "norm"), self.weights["lm_head"])

    def save(self, folder: Path) -> None:
        """Write it as such heads are published."""
        folder.mkdir(parents=True, exist_ok=True)
        size = self.weights["norm"].shape[0]
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": size,
            "intermediate_size": 2 * size,
            "num_hidden_layers": 1,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_heads,
            "rms_norm_eps": _EPS,
            "max_position_embeddings": 2048,
            "vocab_size": len(self.embedding),
            "draft_vocab_size": len(self.embedding),
            "tie_word_embeddings": False,
        }
        (folder / "config.json").write_text(json.dumps(config, indent=1))
        tensors = {f"{name}.weight": weight.detach().contiguous() for name, weight in self.weights.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[name], _EPS)

    def _rotated(self, x: Tensor) -> Tensor:
        half = self.head_dim // 2
        angles = torch.arange(x.shape[2])[:, None] / 10_000.0 ** (torch.arange(half) / half)
        cos, sin = angles.cos(), angles.sin()
        first, second = x[..., :half], x[..., half:]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rows(seed: int) -> Iterator[Tensor]:
    """Batches [B, T] of the corpus."""
    tokenizer = Tokenizer.from_file(str(checkpoint_path() / "tokenizer.json"))
    ids: list[int] = []
    for text in texts(seed):
        ids += tokenizer.encode(_written(text), add_special_tokens=False).ids
        if len(ids) >= _NUM_ROWS * _ROW_TOKENS:
            yield torch.tensor(ids[: _NUM_ROWS * _ROW_TOKENS]).view(_NUM_ROWS, _ROW_TOKENS)
            ids = []


def _written(text: Text) -> str:
    turns = [f"<|im_start|>{each['role']}\n{each['content']}<|im_end|>\n" for each in text.messages]
    return "".join(turns) or text.plain


def guesses(head: TrainedHead, model: PreTrainedModel, ids: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """For each depth the head's logits, and the model's for the same tokens."""
    with torch.no_grad():
        found = model(ids, output_hidden_states=True)
    streams = torch.cat([found.hidden_states[tap].float() for tap in _TAPS], dim=-1)
    hidden, told = F.linear(streams, head.weights["fc"]), found.logits.float()
    for depth in range(_DEPTH):
        # slot i has hidden state i and token i + 1; it guesses token i + 2, which the model does at i + 1
        states = head(hidden[:, : _ROW_TOKENS - 1 - depth], ids[:, 1 + depth :])
        yield head.logits(states), told[:, 1 + depth :]
        hidden = states


def train(seconds: float) -> TrainedHead:
    """Train a head for the demo model, and print how often it is right."""
    torch.manual_seed(0)
    random.seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(checkpoint_path(), dtype=torch.float32)
    head = TrainedHead(model)
    optimizer = torch.optim.AdamW(head.parameters(), lr=4e-3, weight_decay=0.0, betas=(0.9, 0.95))
    begin_s, num_batches = time.monotonic(), 0
    for ids in rows(seed=11):
        progress = (time.monotonic() - begin_s) / seconds
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * min(1.0, num_batches / 20) * (1 - 0.9 * progress)
        losses = [
            0.8**depth * F.cross_entropy(logits.flatten(0, 1), told.softmax(-1).flatten(0, 1))
            for depth, (logits, told) in enumerate(guesses(head, model, ids))
        ]
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        num_batches += 1
    with torch.no_grad():
        right = [
            float((logits.argmax(-1) == told.argmax(-1)).float().mean())
            for logits, told in guesses(head, model, next(rows(seed=12)))
        ]
    shares = ", ".join(f"{each:.3f}" for each in right)
    sys.stdout.write(f"{num_batches} batches; right at each depth: {shares}\n")
    return head


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    train(arguments.seconds).save(arguments.folder)


if __name__ == "__main__":
    main()
