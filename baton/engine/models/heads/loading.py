"""Loads a head for a model that is loaded: an EAGLE-3 checkpoint, or the layer for further tokens of the model's own.

Owns where the tensors are. A head is whole, on the device of its model, and computes in its dtype.
"""

from __future__ import annotations

from pathlib import Path

from baton.engine.models.decoder import Decoder
from baton.engine.models.heads.base import DraftHead
from baton.engine.models.heads.config import mtp_config, read_eagle3
from baton.engine.models.heads.eagle3 import Eagle3Head
from baton.engine.models.heads.mtp import MtpHead
from baton.engine.models.loading import load_weights
from baton.engine.models.ops.base import DecoderOps
from baton.engine.models.parts.base import PartSetup
from baton.engine.models.quantization.base import UNQUANTIZED, Quantization
from baton.engine.models.shard import WHOLE


def eagle3_head(folder: Path, model: Decoder, ops: DecoderOps, quantization: Quantization) -> DraftHead:
    """The EAGLE-3 head in `folder`, quantized while it is loaded if the model is. Raises `ModelLoadError`."""
    own = UNQUANTIZED if quantization.is_published else quantization
    head = Eagle3Head(read_eagle3(folder, model.config), model, _setup(model, ops, own))
    load_weights(folder, head)
    return head


def mtp_head(folder: Path, model: Decoder, ops: DecoderOps, quantization: Quantization) -> DraftHead:
    """The layer for further tokens in the checkpoint of `model`, which is in `folder`. Raises `ModelLoadError`."""
    head = MtpHead(mtp_config(model.config), model, _setup(model, ops, quantization))
    load_weights(folder, head)
    return head


def _setup(model: Decoder, ops: DecoderOps, quantization: Quantization) -> PartSetup:
    return PartSetup(model.dtype, model.device, ops, WHOLE, None, quantization)
