"""The checkpoint of a draft model: whether it fits the model whose tokens it guesses, and what it stores of a token.

It is computed in the dtype of the model, and its KV has the dtype of the model's KV: a block has one.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from baton.device.base import Device
from baton.engine.models.checkpoint import choose_dtype
from baton.engine.models.config import ModelConfig
from baton.engine.models.decoder import TORCH_DTYPES, Decoder
from baton.engine.models.facts import load_facts
from baton.engine.models.identity import dummy_fingerprint, find_checkpoint, model_fingerprint
from baton.engine.models.modelling.config import ModellingConfig
from baton.engine.models.ops.torch_ops import TorchOps
from baton.engine.models.quantization.while_loading import AUTO
from baton.engine.settings import DUMMY, EngineSettings
from baton.engine.speculation.layers import DraftLayers
from baton.engine.speculation.settings import GREEDY, STANDARD, DraftModelAsked
from baton.engine.text.tokenizer_digest import tokenizer_digest
from baton.wire.errors import InvalidSetting

_FLAG = "--speculative-config"
_IDENTITY_BYTES = 4
"""A wrong draft costs time alone."""


@dataclass(frozen=True, slots=True)
class DraftCheckpoint(DraftLayers):
    """A draft model that was not loaded yet. `dtype`: that it is computed in; `quantization`: as `--quantization`;
    `max_tokens`: of the longest request that it guesses for; `num_tokens`: that it guesses at most; `is_greedy`: it
    guesses the likeliest; `is_raced`: it draws by `RACE`, as the model does."""

    folder: Path
    config: ModelConfig
    dtype: str
    quantization: str
    max_tokens: int
    num_tokens: int
    is_greedy: bool
    is_raced: bool


def open_checkpoint(
    asked: DraftModelAsked,
    settings: EngineSettings,
    folder: Path,
    config: ModelConfig | ModellingConfig,
    device: Device,
) -> DraftCheckpoint:
    """The checkpoint that was asked for, beside the model in `folder`. Raises `ModelLoadError` and `InvalidSetting`."""
    is_dummy = settings.load_format == DUMMY
    own = find_checkpoint(asked.checkpoint, weights=not is_dummy)
    facts = load_facts(own)
    if not isinstance(facts, ModelConfig):
        raise InvalidSetting(f"{_FLAG}: {asked.model}: transformers would compute {facts.architecture}, and no drafts")
    if facts.states is not None:
        raise InvalidSetting(f"{_FLAG}: {asked.model} has states, which cannot go back behind a wrong draft")
    _require_same_vocabulary(asked.model, own, facts, folder, config)
    facts = facts.for_context(asked.max_model_len or settings.max_model_len)
    dtype, quantization = choose_dtype(settings.dtype, config), asked.quantization or AUTO
    shapes = Decoder(facts, TORCH_DTYPES[dtype], "meta", TorchOps())
    kind = device.torch_device.type
    fingerprint = dummy_fingerprint(facts, kind) if is_dummy else model_fingerprint(own, facts)
    told = f"{fingerprint}|{quantization}|{asked.rejection_sample_method}"  # nodes of one relay draw alike
    identity = blake2b(told.encode(), digest_size=_IDENTITY_BYTES).hexdigest()
    max_tokens = min(asked.max_model_len or facts.max_context_len, facts.max_context_len)
    num_bytes = sum(parameter.num_bytes for parameter in shapes.parameters())
    return DraftCheckpoint(
        shapes.layer_kvs,
        identity,
        num_bytes,
        own,
        facts,
        dtype,
        quantization,
        max_tokens,
        asked.num_speculative_tokens,
        asked.draft_sample_method == GREEDY,
        asked.rejection_sample_method == STANDARD,
    )


def _require_same_vocabulary(
    name: str, own: Path, facts: ModelConfig, folder: Path, config: ModelConfig | ModellingConfig
) -> None:
    if facts.vocab_size != config.vocab_size:
        raise InvalidSetting(
            f"{_FLAG}: {name} has {facts.vocab_size} tokens and the model {config.vocab_size}: a draft has to be of "
            "the same vocabulary"
        )
    if tokenizer_digest(own) != tokenizer_digest(folder):
        raise InvalidSetting(f"{_FLAG}: {name} has another tokenizer than the model: its tokens mean something else")
