"""A model as clients see it: its name, its text side, and when it was first served.

Its nodes are `router/nodes/registry.py`'s, which knows them by the same name.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from baton.engine.models.facts import load_facts
from baton.engine.models.generation_defaults import AUTO, GenerationDefaults, load_generation_defaults
from baton.engine.models.identity import find_checkpoint, model_fingerprint, model_name
from baton.engine.models.weight_files import weight_files
from baton.engine.text.answers.formats import ParserNames
from baton.engine.text.tokenizer_digest import tokenizer_digest
from baton.router.http.images import Images
from baton.router.http.openai.prompts import PromptMaker
from baton.router.http.openai.request_templates import RequestTemplates
from baton.router.http.openai.strict_model import Strict
from baton.wire.errors import InvalidSetting, ModelLoadError

_AUTO = ParserNames()
_NO_DEFAULTS = GenerationDefaults()
_log = logging.getLogger(__name__)
RequestT = TypeVar("RequestT", bound=Strict)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """`fingerprint` is None when the router's checkpoint folder has a tokenizer but no weights. `started` is in seconds
    since 1970."""

    name: str
    prompts: PromptMaker
    fingerprint: str | None
    started: int
    tokenizer_digest: str = ""
    defaults: GenerationDefaults = _NO_DEFAULTS

    def with_defaults(self, request: RequestT) -> RequestT:
        """The request with the model's own sampling where it says nothing."""
        given = self.defaults.missing_in(request.model_fields_set)
        missing = {name: value for name, value in given.items() if name in type(request).model_fields}
        return request.model_copy(update=missing) if missing else request


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """What all models of a router are loaded with. `templates`: as in `PromptMaker`. `generation_config`: where the
    defaults of requests come from. `image_limit`: the setting `limit_mm_per_prompt`."""

    templates: RequestTemplates | None = None
    parsers: ParserNames = _AUTO
    generation_config: str = AUTO
    model_impl: str = AUTO
    image_limit: str = "image=0"


_DEFAULT_OPTIONS = ModelOptions()


def load_served_models(
    model: str, served_name: str, more_models: Sequence[str], started: int, options: ModelOptions = _DEFAULT_OPTIONS
) -> list[ServedModel]:
    """The model of the `model` setting and those of `more_models`, each written NAME=CHECKPOINT; served since
    `started`, in seconds since 1970.

    Raises `InvalidSetting`, and `ModelLoadError` for a checkpoint without a usable tokenizer.
    """
    found = [_load(model_name(model, served_name), model, started, options)]
    for item in more_models:
        name, _, checkpoint = item.partition("=")
        if not name or not checkpoint:
            raise InvalidSetting(f"--more-models: {item!r:.200} is not NAME=CHECKPOINT")
        found.append(_load(name, checkpoint, started, options))
    _require_distinct(found)
    return found


def _load(name: str, checkpoint: str, started: int, options: ModelOptions) -> ServedModel:
    folder = find_checkpoint(checkpoint, weights=False)
    defaults = load_generation_defaults(options.generation_config, folder)
    if defaults != _NO_DEFAULTS:
        _log.info("requests to %s that do not say otherwise have %s (see --generation-config)", name, defaults)
    images = Images.of_checkpoint(folder, options.image_limit)
    prompts = PromptMaker.from_folder(folder, options.templates, options.parsers, images)
    fingerprint = _fingerprint(folder, options.model_impl)
    return ServedModel(name, prompts, fingerprint, started, tokenizer_digest(folder), defaults)


def _fingerprint(folder: Path, model_impl: str) -> str | None:
    try:
        weight_files(folder)
    except ModelLoadError:
        return None
    # whether code of the checkpoint's own may run is the nodes' question
    return model_fingerprint(folder, load_facts(folder, model_impl, remote_code=True))


def _require_distinct(models: Sequence[ServedModel]) -> None:
    """A node tells its fingerprint and no name, so each model must have its own."""
    if len({model.name for model in models}) < len(models):
        raise InvalidSetting("--more-models: two models have the same name")
    fingerprints = [model.fingerprint for model in models]
    if len(set(fingerprints)) < len(fingerprints):
        reason = "two models have no weights here" if fingerprints.count(None) > 1 else "two models are the same"
        raise InvalidSetting(f"--more-models: {reason}, so nodes of one cannot be told from nodes of the other")
