"""The layers by which drafts are computed, and whose KV lies behind that of the model's layers in each block.

Owns the question whether an engine has any, which every rank answers alike before weights are loaded. A block that has
room for their KV carries it wherever it goes: through the pool, the prefix cache, handoffs and tiers. It is a hint:
where it is missing or wrong, drafts are wrong, and no token is.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from baton.engine.models.config import ModelConfig
from baton.engine.settings import EngineSettings
from baton.engine.speculation.settings import DraftModelAsked, read_asked
from baton.wire.layout import LayerKv

if TYPE_CHECKING:
    from baton.device.base import Device
    from baton.engine.models.modelling.config import ModellingConfig

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DraftLayers:
    """`kvs`: what each of them stores of a token. `identity`: equal where their KV means the same."""

    kvs: tuple[LayerKv, ...]
    identity: str


def open_draft(
    settings: EngineSettings, folder: Path, config: ModelConfig | ModellingConfig, device: Device
) -> DraftLayers | None:
    """The layers that the settings ask for beside the model of `folder`; None for none, and with a log line where they
    cannot be. Raises `ModelLoadError` and `InvalidSetting`."""
    asked = read_asked(settings.speculative_config)
    if not isinstance(asked, DraftModelAsked):
        return None
    reason = _reason_against(settings, config)
    if reason:
        _log.warning("drafts are not used: %s", reason)
        return None
    # imported late: most engines have no draft
    from baton.engine.speculation.draft_model.checkpoint import open_checkpoint

    return open_checkpoint(asked, settings, folder, config, device)


def _reason_against(settings: EngineSettings, config: ModelConfig | ModellingConfig) -> str:
    if settings.divides_pool:
        return "each rank has a KV pool of its own"
    if settings.pipeline_parallel_size > 1:
        return "the layers are divided among stages"
    if isinstance(config, ModelConfig) and config.states is not None:
        return "this model has states, which cannot go back behind a wrong draft"
    return ""
