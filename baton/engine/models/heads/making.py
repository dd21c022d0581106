"""Makes a head for a model: that of an EAGLE-3 checkpoint, or the layer for further tokens of the model's own.

Owns how it is quantized. A head is whole, on the device of its model, and computes in its dtype.
"""

from __future__ import annotations

from pathlib import Path

from baton.engine.models.decoder import Decoder
from baton.engine.models.heads.base import DraftHead
from baton.engine.models.heads.config import mtp_config, read_eagle3
from baton.engine.models.heads.eagle3 import Eagle3Head
from baton.engine.models.heads.mtp import MtpHead
from baton.engine.models.ops.base import DecoderOps
from baton.engine.models.parts.base import PartSetup
from baton.engine.models.quantization.base import UNQUANTIZED, Quantization
from baton.engine.models.shard import WHOLE

EAGLE3, MTP = "eagle3", "mtp"


def make_draft_head(
    method: str, folder: Path, model: Decoder, ops: DecoderOps, quantization: Quantization
) -> DraftHead:
    """The head that `method` finds in `folder`, still to be loaded from there. `quantization`: of the model. Another
    checkpoint is not quantized as published by the model's. Raises `ModelLoadError`."""
    if method == MTP:
        return MtpHead(mtp_config(model.config), model, _setup(model, ops, quantization))
    own = UNQUANTIZED if quantization.is_published else quantization
    return Eagle3Head(read_eagle3(folder, model.config), model, _setup(model, ops, own))


def _setup(model: Decoder, ops: DecoderOps, quantization: Quantization) -> PartSetup:
    return PartSetup(model.dtype, model.device, ops, WHOLE, None, quantization)
