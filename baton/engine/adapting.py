"""The adapters of an engine: which engines may have some, and what their names stand for.

Owns the refusals that need no file. A name is for people and for who makes prompts: below this, an adapter is the
digest of its content.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from baton.engine.model_shard import Basis, ModelShard
from baton.engine.models.adapters.loading import load_adapter
from baton.engine.models.config import ModelConfig
from baton.engine.models.decoder import Decoder
from baton.wire.errors import InvalidSetting


def require_adaptable(basis: Basis) -> None:
    """Raise `InvalidSetting` where no adapter can be applied, before weights are loaded."""
    if basis.settings.num_ranks > 1:
        raise InvalidSetting("adapters are not applied by several ranks yet: use one")
    if not isinstance(basis.config, ModelConfig):
        raise InvalidSetting(
            f"adapters are not applied to {basis.config.architecture}, which transformers' modelling code computes"
        )


def with_adapters(model: ModelShard, folders: Mapping[str, Path]) -> ModelShard:
    """`model` with the adapters in these folders, by their names. Raises `ModelLoadError`."""
    decoder = model.decoder
    if not isinstance(decoder, Decoder):
        return model
    digests = {
        name: load_adapter(folder, decoder.adapters, decoder.dtype, decoder.device) for name, folder in folders.items()
    }
    return replace(model, adapters=digests, weights_bytes=model.weights_bytes + decoder.adapters.num_bytes)
