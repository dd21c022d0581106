"""Chooses what computes drafts with layers of its own, if anything does. All ranks choose alike, before they load."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

from baton.device.base import Device
from baton.engine.models.config import ModelConfig
from baton.engine.models.modelling.config import ModellingConfig
from baton.engine.runner.drawing import INVERSE, RACE, Drawing
from baton.engine.settings import DUMMY, EngineSettings
from baton.engine.speculation.draft_model.checkpoint import open_checkpoint
from baton.engine.speculation.heads.checkpoint import open_head
from baton.engine.speculation.layers import DraftLayers
from baton.engine.speculation.settings import STANDARD, DraftModelAsked, HeadAsked, TextAsked, read_asked

_log = logging.getLogger(__name__)


class NoDrafts(NamedTuple):
    """Why an engine has no layers for drafts: in a word for metrics, and in a sentence."""

    reason: str
    sentence: str


def open_draft(
    settings: EngineSettings, folder: Path, config: ModelConfig | ModellingConfig, device: Device
) -> DraftLayers | None:
    """The layers that the settings ask for beside the model of `folder`; None for none, and with a log line where they
    cannot be. Raises `ModelLoadError` and `InvalidSetting`."""
    asked = read_asked(settings.speculative_config)
    if asked is None or isinstance(asked, TextAsked):
        return None
    if (why := why_no_drafts(settings, config)) is not None:
        _log.warning("drafts come from text alone: %s", why.sentence)
        return None
    if isinstance(asked, DraftModelAsked):
        return open_checkpoint(asked, settings, folder, config, device)
    assert isinstance(config, ModelConfig)  # else there was a reason
    return open_head(asked, settings, folder, config)


def drawing_of(settings: EngineSettings) -> Drawing:
    """How the model draws tokens. Raises `InvalidSetting`."""
    asked = read_asked(settings.speculative_config)
    is_raced = isinstance(asked, DraftModelAsked) and asked.rejection_sample_method == STANDARD
    return RACE if is_raced else INVERSE


def why_no_drafts(settings: EngineSettings, config: ModelConfig | ModellingConfig) -> NoDrafts | None:
    """Why layers that were asked for cannot be; None where they can, or where none were asked for."""
    asked = read_asked(settings.speculative_config)
    if asked is None or isinstance(asked, TextAsked):
        return None
    if isinstance(asked, HeadAsked):
        return _why_no_head(settings, config)
    return _why_no_draft_model(settings, config)


def _why_no_draft_model(settings: EngineSettings, config: ModelConfig | ModellingConfig) -> NoDrafts | None:
    if settings.divides_pool:
        return NoDrafts("ranks", "each rank has a KV pool of its own")
    if settings.pipeline_parallel_size > 1:
        return NoDrafts("stages", "the layers are divided among stages")
    if isinstance(config, ModelConfig) and config.states is not None:
        return NoDrafts("states", "this model has states, beside which layers of drafts have no place")
    return None


def _why_no_head(settings: EngineSettings, config: ModelConfig | ModellingConfig) -> NoDrafts | None:
    if settings.num_ranks > 1:
        return NoDrafts("ranks", "a head reads hidden states of a whole model, and here ranks have shares of it")
    if not isinstance(config, ModelConfig):
        return NoDrafts("model", "transformers computes this model, and does not say what is between its layers")
    if settings.load_format == DUMMY:
        return NoDrafts("weights", "a head for random weights guesses nothing")
    return None
