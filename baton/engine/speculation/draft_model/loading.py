"""Loads a draft model: all of it, in the process that leads the ranks of the model."""

from __future__ import annotations

from dataclasses import replace

from baton.engine.model_shard import Basis
from baton.engine.models.decoder import TORCH_DTYPES, Decoder
from baton.engine.models.dummy import fill_with_noise
from baton.engine.models.loading import check_weights, load_weights
from baton.engine.models.ops.choose import choose_ops
from baton.engine.models.ops.torch_ops import TorchOps
from baton.engine.models.quantization.choose import choose_quantization
from baton.engine.models.text_part import published_names
from baton.engine.settings import DUMMY
from baton.engine.speculation.draft_model.checkpoint import DraftCheckpoint
from baton.runtime.process import return_freed_memory


def load_draft(basis: Basis) -> Decoder | None:
    """The draft model, if there is one. Raises `ModelLoadError` and `InvalidSetting`."""
    draft = basis.draft
    if not isinstance(draft, DraftCheckpoint):
        return None
    config, dtype, device = draft.config, TORCH_DTYPES[draft.dtype], basis.device.torch_device
    is_dummy = basis.settings.load_format == DUMMY
    if config.other_parts and not is_dummy:
        config = replace(config, names=published_names(config.names, draft.folder))
    quantization = choose_quantization(draft.quantization, config, draft.folder, basis.kernels)
    if not is_dummy:
        check_weights(draft.folder, Decoder(config, dtype, "meta", TorchOps(), quantization=quantization))
    decoder = Decoder(config, dtype, device, choose_ops(device, basis.kernels), quantization=quantization)
    if is_dummy:
        fill_with_noise(decoder)
    else:
        load_weights(draft.folder, decoder)
    return_freed_memory()
    return decoder
