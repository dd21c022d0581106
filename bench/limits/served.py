"""The server that a measurement starts for itself: `baton serve` with a model, and what a client must know of it.

Knows neither how it is started nor what it is asked.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.targets.spec import Target
from engine.models.config import load_config
from engine.models.identity import find_checkpoint


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a client has to know of a model: ids below `vocab_size`, prompt and answer within `max_tokens`."""

    vocab_size: int
    num_layers: int
    max_tokens: int


def served_model(model: str) -> ServedModel:
    """Of the `model` setting, as `baton serve` takes it. Raises `ModelLoadError`."""
    config = load_config(find_checkpoint(model, weights=False))
    return ServedModel(config.vocab_size, config.num_layers, config.max_context_len)


def baton_target(name: str, model: str, *flags: str) -> Target:
    """A Baton to be started on a free port."""
    return Target(name, "", ("baton", "serve", *filter(None, (model,)), *flags))
