"""Loads a model for transformers' modelling code, and makes sure that Baton computes the same with it.

Owns the refusals: files that lack tensors, NaN in weights, and a model whose tokens come out otherwise in Baton's
batches. Only safetensors files are read. Code of a checkpoint's own runs only where the setting says so.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from baton.device.base import Device
from baton.engine.attention.base import SequenceShare, attention_staging_bytes
from baton.engine.attention.paged_kv import PagedKv
from baton.engine.attention.torch_backend import TorchAttention
from baton.engine.models.modelling.config import ModellingConfig, cannot_run
from baton.engine.models.modelling.layers import FIXED_ATTENTION, PAGED
from baton.engine.models.modelling.model import ModellingDecoder
from baton.engine.models.weight_files import listed, read_header, weight_files
from baton.wire.errors import ModelLoadError
from baton.wire.layout import KvLayout

_SEED: Final = 0
_DEVIATION: Final = 0.02
_BLOCK_SIZE: Final = 4
_FIRST, _SECOND = 5, 11
"""Tokens of two sequences that are compared; the second comes in two chunks."""
_NUM_FIRST_CHUNK = 6
_TOLERANCE = {torch.float32: 1e-3}
_ROUNDED_TOLERANCE = 0.1
_OF_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")
_log = logging.getLogger(__name__)
_LOAD_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError)


def count_weights(folder: Path, config: ModellingConfig, dtype: torch.dtype, *, remote_code: bool) -> int:
    """The bytes of all weights, once it is known that the model can be computed: nothing has been allocated. Raises
    `ModelLoadError`."""
    with torch.device("meta"):
        # products of experts exist on this device in no other type
        model = _from_config(folder, config, torch.bfloat16, remote_code=remote_code)
    ModellingDecoder(config, model)
    return sum(parameter.numel() * dtype.itemsize for parameter in model.parameters())


def load_modelling_decoder(
    folder: Path,
    config: ModellingConfig,
    dtype: torch.dtype,
    device: Device,
    progress: Callable[[int, int], None] | None = None,
    *,
    remote_code: bool,
) -> ModellingDecoder:
    """The model of the checkpoint in `folder`, on `device`. `progress` is as in `load_weights`. Raises
    `ModelLoadError`."""
    entries = {name: entry for path in weight_files(folder) for name, entry in read_header(path).items()}
    _require_all_experts(entries)
    total = sum(entry.num_bytes for entry in entries.values())
    if progress is not None:
        progress(0, total)
    _log.info("%s is computed by transformers' modelling code, slower than Baton's own would", config.architecture)
    disable_progress_bar()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=PAGED, local_files_only=True, use_safetensors=True,
            trust_remote_code=remote_code, output_loading_info=True,
        )  # fmt: skip
    except _LOAD_ERRORS as error:
        raise cannot_run(config.architecture, " ".join(str(error).split())[:300]) from error
    _require_complete(report)
    _require_numbers(model)
    decoder = _placed(config, model, device)
    if progress is not None:
        progress(total, total)
    return decoder


def random_modelling_decoder(
    folder: Path, config: ModellingConfig, dtype: torch.dtype, device: Device, *, remote_code: bool
) -> ModellingDecoder:
    """The model of a checkpoint folder with random weights, as `fill_with_noise` makes them: matrices near 0, vectors
    near 1."""
    model = _from_config(folder, config, dtype, remote_code=remote_code)
    generator = torch.Generator().manual_seed(_SEED)
    with torch.inference_mode():
        for parameter in model.parameters():
            parameter.normal_(0.0 if parameter.dim() > 1 else 1.0, _DEVIATION, generator=generator)
    return _placed(config, model, device)


def _placed(config: ModellingConfig, model: PreTrainedModel, device: Device) -> ModellingDecoder:
    model = model.eval().requires_grad_(False).to(device.torch_device)
    expected = _expected_logits(model)
    decoder = ModellingDecoder(config, model)
    require_same_tokens(decoder, device, expected)
    return decoder


def _from_config(folder: Path, config: ModellingConfig, dtype: torch.dtype, *, remote_code: bool) -> PreTrainedModel:
    try:
        described = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=remote_code)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            described, dtype=dtype, attn_implementation=PAGED, trust_remote_code=remote_code
        )
    except _LOAD_ERRORS as error:
        is_fixed = isinstance(error, KeyError) and PAGED in str(error)
        reason = FIXED_ATTENTION if is_fixed else " ".join(str(error).split())[:300]
        raise cannot_run(config.architecture, reason) from error
    return model.eval()


def _require_all_experts(names: Iterable[str]) -> None:
    """transformers stacks the tensors of experts, and does not say which one is missing."""
    numbers: dict[str, dict[str, set[int]]] = {}
    for match in filter(None, map(_OF_EXPERT.fullmatch, names)):
        numbers.setdefault(match[1], {}).setdefault(match[3], set()).add(int(match[2]))
    missing = [
        f"{layer}.{number}.{part}"
        for layer, parts in numbers.items()
        for part, found in parts.items()
        for number in sorted(set().union(*parts.values()) - found)
    ]
    if missing:
        raise ModelLoadError(f"the checkpoint lacks {len(missing)} tensors: {listed(missing)}")


def _require_complete(report: dict[str, Any]) -> None:
    for kind, what in (("missing_keys", "lacks"), ("mismatched_keys", "has in another shape")):
        names = sorted(str(name) for name in report.get(kind, ()))
        if names:
            raise ModelLoadError(f"the checkpoint {what} {len(names)} tensors: {listed(names)}")


def _require_numbers(model: PreTrainedModel) -> None:
    for name, parameter in model.named_parameters():
        if parameter.numel() and not all(bound.isfinite() for bound in parameter.detach().aminmax()):
            raise ModelLoadError(f"there are NaN or infinite numbers in {name}")
        if parameter.dim() > 1 and parameter.numel() and not parameter.any():
            raise ModelLoadError(f"{name} has nothing but zeros: the file was not written completely")


def _sequences(model: PreTrainedModel | ModellingDecoder, vocab_size: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, vocab_size, (_FIRST + _SECOND,), generator=torch.Generator().manual_seed(_SEED))
    ids = ids.to(model.device)
    return ids[:_FIRST], ids[_FIRST:]


@torch.inference_mode()
def _expected_logits(model: PreTrainedModel) -> Tensor:
    """What transformers itself computes for the second sequence alone: [_SECOND, V] float32."""
    model.set_attn_implementation("eager")
    _, second = _sequences(model, model.config.get_text_config().vocab_size)
    logits: Tensor = model(input_ids=second[None], use_cache=False).logits[0]
    model.set_attn_implementation(PAGED)
    return logits.float()


@torch.inference_mode()
def require_same_tokens(decoder: ModellingDecoder, device: Device, expected: Tensor) -> None:
    """Compute the second sequence in two chunks, the first of them beside another sequence, with KV in blocks. Raises
    `ModelLoadError` when its logits are not `expected`."""
    first, second = _sequences(decoder, decoder.config.vocab_size)
    layout = KvLayout.of_layers(str(decoder.dtype).removeprefix("torch."), _BLOCK_SIZE, decoder.layer_kvs)
    num_blocks = -(-_FIRST // _BLOCK_SIZE) + -(-_SECOND // _BLOCK_SIZE)
    elements = layout.block_bytes // decoder.dtype.itemsize
    blocks = torch.zeros(num_blocks, elements, dtype=decoder.dtype, device=decoder.device)
    attention = TorchAttention(PagedKv(layout, blocks), decoder.layer_rules)
    staging = device.staging(attention_staging_bytes(_FIRST + _SECOND, 2, num_blocks))
    beside, table = (3, 0), (4, 1, 2)
    steps = (
        ((SequenceShare(0, _FIRST, beside), first), (SequenceShare(0, _NUM_FIRST_CHUNK, table), second)),
        ((SequenceShare(_NUM_FIRST_CHUNK, _SECOND - _NUM_FIRST_CHUNK, table), second),),
    )
    found = []
    for step in steps:
        staging.begin()
        attention.plan([share for share, _ in step], staging)
        staging.upload()
        ids = torch.cat([tokens[share.start : share.context_len] for share, tokens in step])
        positions = torch.cat([torch.arange(share.start, share.context_len) for share, _ in step]).to(decoder.device)
        hidden = decoder.forward(ids, positions, attention)
        found.append(decoder.logits(hidden[-step[-1][0].num_tokens :]))
    difference = (torch.cat(found) - expected).norm() / expected.norm()
    if not difference <= _TOLERANCE.get(decoder.dtype, _ROUNDED_TOLERANCE):
        raise cannot_run(
            decoder.config.architecture,
            f"its logits differ by {difference.item():.2g} of their size when a prompt is computed in chunks and "
            "beside another one: something else than attention connects its tokens",
        )
