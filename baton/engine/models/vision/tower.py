"""The tower of a model that sees: what its layers take in the place of the embeddings of an image's tokens.

Owns the tower and the projector behind it, in transformers' own modelling code, with the weights of the checkpoint in
the model's dtype, and the cache of what it has computed, by the digest of an image and the root of the request's
hashes: a client finds by no timing what another one has shown. Knows no prompts and no steps.

Letters: M tokens of an image that get something of it, E hidden size, K layers behind which they get more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText, initialization

from baton.engine.models.text_part import OTHER_PARTS
from baton.engine.models.vision.facts import ImageFacts, PixelRule, QwenFacts
from baton.engine.models.weight_files import listed, read_header, weight_files
from baton.wire.errors import InvalidRequest, ModelLoadError
from baton.wire.images import PromptImage

MAX_CACHED_BYTES = 2**28
_CANNOT_BUILD = (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError)
_FEW_TOKENS = 8


class Tower:
    """The tower of the checkpoint in `folder`, on `device`. Used by one thread. `num_bytes`: of its weights."""

    def __init__(self, folder: Path, facts: ImageFacts, dtype: torch.dtype, device: torch.device) -> None:
        """Raises `ModelLoadError` when the files lack a tensor of it, or have one that it does not use."""
        self.facts: ImageFacts = facts
        self._dtype, self._device = dtype, device
        self._model = _without_text(folder, dtype)
        _load(folder, self._model, dtype)
        self._model.to(device).eval().requires_grad_(False)
        self.num_bytes = sum(each.numel() * each.element_size() for each in self._model.parameters())
        self._values = values_of(facts.pixel)
        self._cached: OrderedDict[tuple[bytes, bytes], Tensor] = OrderedDict()
        self._num_cached_bytes = 0

    def rows(self, image: PromptImage, hash_root: bytes) -> Tensor:
        """[1 + K, M, E] of an image with pixels, see `MediaRows`; the caller does not change it. Those of a request
        with another `hash_root`, which may be another client's, are computed again."""
        key = (hash_root, image.digest)
        known = self._cached.get(key)
        if known is not None:
            self._cached.move_to_end(key)
            return known
        if not image.payload:
            raise InvalidRequest("an image came without its pixels", "messages")
        found = self._compute(image)
        self._cached[key] = found
        self._num_cached_bytes += found.nbytes
        while self._num_cached_bytes > MAX_CACHED_BYTES and len(self._cached) > 1:
            self._num_cached_bytes -= self._cached.popitem(last=False)[1].nbytes
        return found

    @torch.inference_mode()
    def _compute(self, image: PromptImage) -> Tensor:
        levels = np.frombuffer(image.payload, dtype=np.uint8).reshape(image.height, image.width, 3)
        pixels = torch.from_numpy(np.stack([self._values[channel][levels[..., channel]] for channel in range(3)]))
        inputs = inputs_of(self.facts, pixels.to(self._device, self._dtype))
        found = self._model.get_image_features(**inputs, return_dict=True)
        deeper = getattr(found, "deepstack_features", None) or ()
        return torch.stack([_joined(each) for each in (found.pooler_output, *deeper)]).to(self._dtype)


def _joined(found: Any) -> Tensor:
    """[M, E] of what may be given image by image."""
    rows: Tensor = torch.cat(list(found)) if isinstance(found, tuple | list) else found
    return rows.reshape(-1, rows.shape[-1])


def inputs_of(facts: ImageFacts, pixels: Tensor) -> dict[str, Any]:
    """The arguments of transformers' code for one image. pixels: [3, H, W]."""
    channels, height, width = pixels.shape
    if not isinstance(facts, QwenFacts):
        return {"pixel_values": pixels[None], "image_sizes": torch.tensor([[height, width]])}
    patch, merge, rows, columns = facts.patch, facts.merge, height // facts.patch, width // facts.patch
    cut = pixels.reshape(channels, rows // merge, merge, patch, columns // merge, merge, patch)
    # one patch after another, those of a token together; each stands for several moments of a film
    patches = cut.permute(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None].expand(-1, -1, -1, -1, -1, facts.moments, -1, -1)
    grid = torch.tensor([[1, rows, columns]], device=pixels.device)
    return {"pixel_values": patches.reshape(rows * columns, -1), "image_grid_thw": grid}


def values_of(rule: PixelRule) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The value of each of the 256 numbers of a pixel in each channel, [3, 256], rounded as transformers does."""
    scaled = (np.arange(256, dtype=np.float64) * rule.factor).astype(np.float32)
    mean, std = (np.array(each, dtype=np.float32)[:, None] for each in (rule.mean, rule.std))
    found: np.ndarray[Any, np.dtype[np.float32]] = (scaled - mean) / std
    return found


def _without_text(folder: Path, dtype: torch.dtype) -> Any:
    """The model in transformers' code, weights unset, with no layers of text and hardly any of the vocabulary."""
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        text = config.text_config
        text.num_hidden_layers, text.vocab_size, text.pad_token_id = 0, _FEW_TOKENS, None
        if getattr(text, "layer_types", None) is not None:
            text.layer_types = []
        with initialization.no_init_weights():
            return AutoModelForImageTextToText.from_config(config, dtype=dtype).model
    except _CANNOT_BUILD as error:
        raise ModelLoadError(f"the tower cannot be built: {' '.join(str(error).split())[:300]}") from error


def _load(folder: Path, model: nn.Module, dtype: torch.dtype) -> None:
    """Copy the tensors of the tower. Raises `ModelLoadError` unless all of both sides fit."""
    parts = {prefix for prefix in OTHER_PARTS if not prefix.startswith("model.")}
    wanted = {name: parameter for name, parameter in model.named_parameters() if any(map(name.startswith, parts))}
    published = {
        name: path for path in weight_files(folder) for name in read_header(path) if name.startswith(OTHER_PARTS)
    }
    found = {name.removeprefix("model."): name for name in published}
    for what, names in (("lacks", wanted.keys() - found.keys()), ("has too many", found.keys() - wanted.keys())):
        if names:
            raise ModelLoadError(f"the checkpoint {what} tensors of the tower: {listed(sorted(names))}")
    with _readers(set(published.values())) as readers:
        for name, parameter in wanted.items():
            tensor = readers[published[found[name]]].get_tensor(found[name])
            if tensor.shape != parameter.shape:
                raise ModelLoadError(f"{found[name]} has the shape {list(tensor.shape)}, not {list(parameter.shape)}")
            parameter.data.copy_(tensor.to(dtype))
            if not all(bound.isfinite() for bound in parameter.detach().aminmax()):
                raise ModelLoadError(f"there are NaN or infinite numbers in {found[name]}")


@contextmanager
def _readers(paths: set[Path]) -> Iterator[Mapping[Path, Any]]:
    readers = {path: safe_open(path, framework="pt") for path in paths}
    yield readers
    readers.clear()
