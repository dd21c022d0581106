"""Trains the demo model from nothing and writes it as a published checkpoint.

    python -m baton.demo.training.train --out build/demo --steps 3600 --threads 1 --seed 1
    python -m baton.demo.training.train --out build/demo --steps 4600 --threads 1 --seed 1
    python -m baton.demo.training.train --out build/demo --steps 5400 --threads 1 --seed 1

    python -m baton.demo.training.train --start build/demo --out build/demo-agent --steps 1150 --threads 2 --seed 1
    python -m baton.demo.training.train --start build/demo --out build/demo-agent --steps 3000 --threads 2 --seed 1
    python -m baton.demo.training.train --start build/demo --out build/demo-agent --steps 5000 --threads 2 --seed 1
    python -m baton.demo.training.train --start build/demo --out build/demo-agent --steps 6500 --threads 2 --seed 1
    python -m baton.demo.training.train --start build/demo --out build/demo-agent --steps 6850 --threads 2 --seed 1

are the commands the packaged checkpoint comes from. Each goes on from the state of the one before, with the learning
rate up again and down once more; the last five, the lesson with tools, JSON and thoughts, begin with the weights that
the first three have made and give the markers tokens of their own. The first three take a little over an hour of one
core, the others about an hour of two. (The packaged weights come from a run of the last five between which shares of
texts were changed.) `--minutes` instead of `--steps` trains for a time, on any machine.

First a byte-level BPE tokenizer (digits one by one), then a small Qwen3 model on packed texts of
`baton.demo.training.corpus` and `baton.demo.training.agents`; the loss counts what the assistant says and plain text.
The texts, their order, the batches and the first weights depend on the seed only. Every few minutes the export and,
below `--state`, everything needed to continue are written to a temporary name and renamed, so that the run may be cut
off at any moment; starting the same command again continues it.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import nn
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM

from baton.demo.training.batches import (
    BATCH_TOKENS,
    END_OF_TEXT,
    ROW_TOKENS,
    TURN_END,
    add_markers,
    agent_batches,
    batches,
    token_id,
    train_tokenizer,
)
from baton.demo.training.template import CHAT_TEMPLATE

WARMUP_STEPS: Final = 100
PEAK_RATE: Final = 3e-3
LAST_PEAK_RATE: Final = 1.5e-3
DECAY_SHARE: Final = 0.35
ROPE_THETA: Final = 10000.0
SAVE_EVERY_S: Final = 240.0


@dataclass(frozen=True)
class Plan:
    """How long to train: `steps` when given, else `minutes`."""

    minutes: float
    steps: int | None

    def progress(self, step: int, elapsed_s: float) -> float:
        """Return how much of the training is done, from 0 to 1."""
        return min(1.0, step / self.steps if self.steps else elapsed_s / (60 * self.minutes))


def build_model(tokenizer: Tokenizer) -> Qwen3ForCausalLM:
    """Build the model with fresh weights: about 3.4 million parameters."""
    config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        bos_token_id=None,
        eos_token_id=token_id(tokenizer, TURN_END),
        pad_token_id=token_id(tokenizer, END_OF_TEXT),
        attn_implementation="sdpa",
    )
    return Qwen3ForCausalLM(config)


def text_borders(ids: torch.Tensor, end: int) -> torch.Tensor:
    """Return which token may look at which, [num_rows, 1, row_tokens, row_tokens]: earlier ones of its own text."""
    before = functional.pad((ids == end).long(), (1, 0))[:, :-1].cumsum(1)
    same_text = before[:, :, None] == before[:, None, :]
    return same_text.tril()[:, None]


def loss_of(model: Qwen3ForCausalLM, ids: torch.Tensor, counted: torch.Tensor, end: int) -> torch.Tensor:
    """Return the mean cross entropy of the counted tokens; only they reach the output layer.

    In short rows a text sees only itself, which is how it is served and what lets the model learn quickly to copy
    names and numbers from the question. A long row is one stretch: its far tokens are all that far distances have.
    """
    mask = text_borders(ids, end) if ids.shape[1] == ROW_TOKENS else None
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        hidden = hidden[:, :-1][counted[:, 1:]]
        logits = functional.linear(hidden, model.model.embed_tokens.weight)
    return functional.cross_entropy(logits.float(), ids[:, 1:][counted[:, 1:]])


def rate(step: int, progress: float, peak: float = PEAK_RATE) -> float:
    """Return the learning rate: a short warm-up, a plateau, and a fall to nothing in the last part."""
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    left = min(1.0, (1.0 - progress) / DECAY_SHARE)
    return peak * warm * max(0.01, left)


def optimizers_for(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers and AdamW for the embedding and the norms.

    Muon (https://kellerjordan.github.io/posts/muon/) instead of AdamW for all: after 0.4 million tokens the loss was
    0.80 and not 1.02, at the same speed.
    """
    matrices = [weight for name, weight in model.named_parameters() if weight.dim() == 2 and "embed" not in name]
    others = [weight for name, weight in model.named_parameters() if weight.dim() != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=PEAK_RATE, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=PEAK_RATE, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]


def published_config(config: Qwen3Config) -> dict[str, object]:
    """Return what config.json says, in the words of the published Qwen3 checkpoints."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "hidden_size": config.hidden_size,
        "initializer_range": config.initializer_range,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": ROPE_THETA,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": config.vocab_size,
    }


def export(model: Qwen3ForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Write the published checkpoint: weights in bfloat16, each file under a temporary name first."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    temporary = out / ".model.safetensors"
    save_file(weights, temporary, metadata={"format": "pt"})
    temporary.chmod(0o644)  # the writer of safetensors makes it private
    temporary.replace(out / "model.safetensors")
    turn_end, end = token_id(tokenizer, TURN_END), token_id(tokenizer, END_OF_TEXT)
    _write(out / "config.json", published_config(model.config))
    _write(
        out / "generation_config.json",
        {"eos_token_id": [turn_end, end], "pad_token_id": end, "do_sample": False},
    )
    _write(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": TURN_END,
            "pad_token": END_OF_TEXT,
            "bos_token": None,
            "model_max_length": 2048,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    _write(out / "tokenizer.json", json.loads(tokenizer.to_str()))


def _write(path: Path, value: object) -> None:
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    temporary.replace(path)


def save_state(
    state: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer], step: int, elapsed_s: float
) -> None:
    """Write weights, moments and counters, everything a cut-off run needs to go on."""
    state.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {"counters": torch.tensor([step, elapsed_s], dtype=torch.float64)}
    for name, parameter in model.named_parameters():
        tensors[f"weight/{name}"] = parameter.detach()
        for optimizer in optimizers:
            for moment, value in optimizer.state.get(parameter, {}).items():
                tensors[f"{moment}/{name}"] = value.detach()
    temporary = state / ".state.safetensors"
    save_file(tensors, temporary)
    temporary.replace(state / "state.safetensors")


def load_state(state: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> tuple[int, float]:
    """Put saved weights and moments back; return the step and the seconds trained, zeros without them."""
    file = state / "state.safetensors"
    if not file.exists():
        return 0, 0.0
    tensors = load_file(file)
    moments = ("step", "exp_avg", "exp_avg_sq", "momentum_buffer")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[f"weight/{name}"])
            saved = {moment: tensors[f"{moment}/{name}"] for moment in moments if f"{moment}/{name}" in tensors}
            for optimizer in optimizers:
                if any(parameter is owned for group in optimizer.param_groups for owned in group["params"]):
                    optimizer.state[parameter] = saved
    step, elapsed_s = tensors["counters"].tolist()
    return int(step), elapsed_s


def load_start(start: Path, model: nn.Module) -> None:
    """Take the weights of an exported checkpoint. Tokens that it lacks begin as the mean of the others."""
    tensors = load_file(start / "model.safetensors")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            found = tensors[name].float()
            if found.shape != parameter.shape:
                found = torch.cat([found, found.mean(0) + parameter[len(found) :]])
            parameter.copy_(found)


def _tokenizer_of(state: Path, start: Path | None, seed: int) -> Tokenizer:
    """The tokenizer of an earlier run, of the checkpoint to start from with the markers added, or a new one."""
    saved = state / "tokenizer.json"
    if saved.exists():
        return Tokenizer.from_file(str(saved))
    if start is None:
        tokenizer = train_tokenizer(seed)
    else:
        tokenizer = Tokenizer.from_file(str(start / "tokenizer.json"))
        add_markers(tokenizer)
    state.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(saved))
    return tokenizer


def train(out: Path, state: Path, plan: Plan, seed: int, start: Path | None = None) -> None:
    """Train until the plan is fulfilled, continuing what is saved under `state`; with `start`, the last lesson from the
    weights of that checkpoint."""
    torch.manual_seed(seed)
    tokenizer = _tokenizer_of(state, start, seed)
    model = build_model(tokenizer)
    if start is not None:
        load_start(start, model)
    end = token_id(tokenizer, END_OF_TEXT)
    optimizers = optimizers_for(model)
    step, before_s = load_state(state, model, optimizers)
    started = saved = reported = time.monotonic()
    peak = PEAK_RATE if start is None else LAST_PEAK_RATE
    source = islice((batches if start is None else agent_batches)(tokenizer, seed + 1), step, None)
    print(
        f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters, from step {step}",
        flush=True,
    )
    losses: list[float] = []
    for ids, counted in source:
        now = time.monotonic()
        elapsed_s = before_s + now - started
        progress = plan.progress(step, elapsed_s)
        if progress >= 1.0:
            break
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = rate(step, progress, peak)
        loss = loss_of(model, ids, counted, end)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
        losses.append(loss.item())
        step += 1
        if len(losses) == 50:
            speed = len(losses) * BATCH_TOKENS / (time.monotonic() - reported)
            print(
                f"step {step} {step * BATCH_TOKENS / 1e6:.2f}M tokens {elapsed_s / 60:.1f} min "
                f"loss {sum(losses) / len(losses):.4f} {speed:.0f} tokens/s",
                flush=True,
            )
            losses, reported = [], time.monotonic()
        if now - saved > SAVE_EVERY_S:
            export(model, tokenizer, out)
            save_state(state, model, optimizers, step, elapsed_s)
            saved = now
    export(model, tokenizer, out)
    save_state(state, model, optimizers, step, before_s + time.monotonic() - started)


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description="Train Baton's demo model.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the exported checkpoint")
    parser.add_argument("--state", type=Path, help="folder of what a cut-off run continues from (default: OUT.state)")
    parser.add_argument("--minutes", type=float, default=75.0, help="how long to train")
    parser.add_argument("--steps", type=int, help="train this many steps instead, for a run that repeats exactly")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="CPU threads")
    parser.add_argument("--seed", type=int, default=1, help="seed of texts and first weights")
    parser.add_argument("--start", type=Path, help="checkpoint to begin the last lesson from: tools, JSON and thinking")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    state = options.state or options.out.with_name(options.out.name + ".state")
    train(options.out, state, Plan(options.minutes, options.steps), options.seed, options.start)


if __name__ == "__main__":
    main()
