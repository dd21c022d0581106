"""Chooses what computes drafts with layers of its own, if anything does. All ranks choose alike, before they load."""

from __future__ import annotations

import logging
from pathlib import Path

from baton.device.base import Device
from baton.engine.models.config import ModelConfig
from baton.engine.models.modelling.config import ModellingConfig
from baton.engine.settings import EngineSettings
from baton.engine.speculation.draft_model.checkpoint import open_checkpoint
from baton.engine.speculation.layers import DraftLayers
from baton.engine.speculation.settings import DraftModelAsked, read_asked

_log = logging.getLogger(__name__)


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
    return open_checkpoint(asked, settings, folder, config, device)


def _reason_against(settings: EngineSettings, config: ModelConfig | ModellingConfig) -> str:
    if settings.divides_pool:
        return "each rank has a KV pool of its own"
    if settings.pipeline_parallel_size > 1:
        return "the layers are divided among stages"
    if isinstance(config, ModelConfig) and config.states is not None:
        return "this model has states, which cannot go back behind a wrong draft"
    return ""
