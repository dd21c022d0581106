"""What is left of keys and values in a pool of 8-bit codes, for models and attention that compare with one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from baton.engine.attention.kv_planes import decoded, encoded
from tests.engine.models.dense_attention import DenseAttention


def rounded(values: Tensor) -> Tensor:
    """Keys or values [..., D] as their codes hold them."""
    rows = values.reshape(-1, values.shape[-1])
    return decoded(*encoded(rows)).to(values.dtype).view(values.shape)


class RoundedAttention(DenseAttention):
    """See `DenseAttention`."""

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().run(layer, q, rounded(k), rounded(v))


@contextmanager
def rounding(model: PreTrainedModel) -> Iterator[None]:
    """Attention of transformers' own code, over rounded keys and values; the model attends by "eager"."""
    module: Any = sys.modules[type(model).__module__]
    exact = module.eager_attention_forward

    def attend(layer: Any, query: Tensor, key: Tensor, value: Tensor, *more: Any, **options: Any) -> Any:
        return exact(layer, query, rounded(key), rounded(value), *more, **options)

    module.eager_attention_forward = attend
    try:
        yield
    finally:
        module.eager_attention_forward = exact
