"""The checkpoint of a head: whether it fits the model that it is for, what it stores of a token, and the loading of it.

A head is in the dtype of its model, and so is its KV: a block has one. The layer for further tokens is in the model's
own files.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from baton.engine.models.checkpoint import choose_dtype, resolve_checkpoint
from baton.engine.models.config import ModelConfig
from baton.engine.models.decoder import TORCH_DTYPES, Decoder
from baton.engine.models.heads.base import DraftHead
from baton.engine.models.heads.making import EAGLE3, MTP, make_draft_head
from baton.engine.models.loading import check_weights, load_weights
from baton.engine.models.ops.base import DecoderOps
from baton.engine.models.ops.torch_ops import TorchOps
from baton.engine.models.quantization.choose import choose_quantization
from baton.engine.models.quantization.while_loading import AUTO
from baton.engine.models.weight_files import weights_digest
from baton.engine.native.library import Kernels
from baton.engine.settings import EngineSettings
from baton.engine.speculation.layers import DraftLayers
from baton.engine.speculation.settings import Eagle3Asked, HeadAsked

_IDENTITY_DIGITS = 8
"""A wrong draft costs time alone."""


@dataclass(frozen=True, slots=True)
class HeadCheckpoint(DraftLayers):
    """A head that was not loaded yet. `folder`: of the model, for the layer that it ships; `quantization`: as
    `--quantization`. `num_tokens`: that are guessed at most."""

    method: str
    folder: Path
    quantization: str
    num_tokens: int

    reads_steps: ClassVar[bool] = True

    def load(self, model: Decoder, ops: DecoderOps, kernels: Kernels | None) -> DraftHead:
        """The head of `model`, computed by `ops`. Raises `ModelLoadError`."""
        quantization = choose_quantization(self.quantization, model.config, self.folder, kernels)
        head = make_draft_head(self.method, self.folder, model, ops, quantization)
        load_weights(self.folder, head)
        return head


def open_head(asked: HeadAsked, settings: EngineSettings, folder: Path, config: ModelConfig) -> HeadCheckpoint:
    """The head that was asked for, beside the model in `folder`. Its tensors are all there. Raises `ModelLoadError`."""
    method, own, identity, quantization = MTP, folder, MTP, settings.quantization
    if isinstance(asked, Eagle3Asked):
        method, own = EAGLE3, resolve_checkpoint(asked.checkpoint)
        identity = f"{EAGLE3}-{weights_digest(own)[:_IDENTITY_DIGITS]}"
    shapes = Decoder(config, TORCH_DTYPES[choose_dtype(settings.dtype, config)], "meta", TorchOps())
    head = make_draft_head(method, own, shapes, TorchOps(), choose_quantization(AUTO, config, folder))
    check_weights(own, head)
    num_bytes = sum(parameter.num_bytes for parameter in head.parameters())
    return HeadCheckpoint(head.layer_kvs, identity, num_bytes, method, own, quantization, asked.num_speculative_tokens)
