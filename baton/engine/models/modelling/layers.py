"""What the layers of a transformers model ask of attention, found out by running the model once over nothing.

Owns the one function that Baton registers with transformers, and the refusal of models for which paged attention of
single sequences would compute something else: layers without attention or with several, masks that are neither causal
nor a window, arguments that Baton's attention does not know.

Every module of a model that is prepared here has an attribute `baton` that answers its attention calls: a `_Probe`
while the model is looked at, later a `_Layer` (`baton.engine.models.modelling.model`). So nothing is global but the two
names in transformers' registries.

Letters: T tokens, Hq query heads, Hkv key and value heads, D size of query and key heads, Dv of value heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from baton.engine.attention.base import LayerRule
from baton.engine.models.modelling.config import cannot_run
from baton.wire.layout import LayerKv

PROBED: Final = "baton-probed"
PAGED: Final = "baton-paged"
"""What transformers calls Baton's attention. The first is told the masks, which are not made for the second."""
FIXED_ATTENTION: Final = "transformers does not let its attention be replaced"
_NUM_PROBED = 2
_FAR = 1 << 24
_HARMLESS = frozenset(
    (
        *(
            "dropout",
            "scaling",
            "sliding_window",
            "softcap",
            "s_aux",
            "is_causal",
            "position_ids",
            "position_embeddings",
        ),
        *("cache_position", "use_cache", "return_dict", "output_attentions", "output_hidden_states"),
        "output_router_logits",
    )
)
"""Arguments of attention calls that are understood, or say nothing about attention."""

_Mask: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Whether, in a batch and for a head, a query at a position sees a key at a position."""


class Answers(Protocol):
    """The attention that a module of transformers calls."""

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, told: dict[str, Any]
    ) -> Tensor:
        """Attention of q [1, Hq, T, D] over k [1, Hkv, T, D] and v [1, Hkv, T, Dv]: [1, T, Hq, Dv]."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class AttentionLayer:
    """The attention of one layer. `kv`: the KV that it stores of a token, with values filled up to the size of keys."""

    module: nn.Module
    num_heads: int
    kv: LayerKv
    rule: LayerRule


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **told: Any
) -> tuple[Tensor, None]:
    """What transformers calls in every layer, in its own words."""
    answers = cast(Answers, module.baton)
    return answers.attend(module, query, key, value, attention_mask, told), None


def _marked_mask(*, mask_function: _Mask, device: torch.device, **_: Any) -> Tensor:
    """Instead of a mask: a tensor that carries the rule by which it would be made."""
    marked = torch.empty(1, 1, 1, 1, device=device)
    marked.baton_mask = mask_function  # type: ignore[attr-defined]
    return marked


ALL_ATTENTION_FUNCTIONS.register(PROBED, _attend)
ALL_ATTENTION_FUNCTIONS.register(PAGED, _attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(PROBED, _marked_mask)


def set_answers(module: nn.Module, answers: Answers) -> None:
    """Let `answers` stand behind the attention of `module`."""
    # not a parameter, a buffer or a child: torch shall not see it
    object.__setattr__(module, "baton", answers)


@torch.inference_mode()
def find_layers(model: PreTrainedModel) -> tuple[AttentionLayer, ...]:
    """The attention of each layer, in the order in which they are computed; the model may be on the device "meta".

    Raises `ModelLoadError` for a model that Baton's attention would compute wrongly.
    """
    architecture = type(model).__name__
    if not model._supports_attention_backend or model._is_stateful:
        raise cannot_run(architecture, FIXED_ATTENTION)
    probe = _Probe(architecture)
    for module in model.modules():
        set_answers(module, probe)
    model.set_attn_implementation(PROBED)
    ids = torch.zeros(1, _NUM_PROBED, dtype=torch.int64, device=model.device)
    try:
        model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, NotImplementedError) as error:
        raise cannot_run(architecture, f"a first pass fails: {' '.join(str(error).split())[:200]}") from error
    finally:
        model.set_attn_implementation(PAGED)
    return probe.checked(model.config.get_text_config().num_hidden_layers)


class _Probe:
    """Notes each layer's attention and answers zeros."""

    def __init__(self, architecture: str) -> None:
        self._architecture = architecture
        self._layers: list[AttentionLayer] = []

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, told: dict[str, Any]
    ) -> Tensor:
        """Note a layer's shapes and rule, and return zeros [1, T, Hq, Dv]. Raises `ModelLoadError` for attention that
        Baton lacks."""
        unknown = sorted(name for name, value in told.items() if name not in _HARMLESS and value is not None)
        if unknown:
            raise cannot_run(self._architecture, f"its attention is told {', '.join(unknown)}")
        if k.shape[3] != q.shape[3] or v.shape[3] > k.shape[3] or k.shape[:3] != v.shape[:3]:
            shapes = f"queries {list(q.shape)}, keys {list(k.shape)}, values {list(v.shape)}"
            raise cannot_run(self._architecture, f"its attention has unusual shapes: {shapes}")
        kv = LayerKv(k.shape[1], k.shape[3], self._window(mask))
        self._layers.append(AttentionLayer(module, q.shape[1], kv, _rule(told, q.shape[3])))
        return q.new_zeros(1, q.shape[2], q.shape[1], v.shape[3])

    def checked(self, num_layers: int) -> tuple[AttentionLayer, ...]:
        """The layers, once it is known that each has attended once."""
        num_modules = len({layer.module for layer in self._layers})
        if not num_layers == num_modules == len(self._layers):
            raise cannot_run(
                self._architecture,
                f"its {num_layers} layers attend {len(self._layers)} times, in {num_modules} places: something else "
                "than plain attention connects its tokens",
            )
        if len({layer.num_heads for layer in self._layers}) > 1:
            raise cannot_run(self._architecture, "its layers have different numbers of heads")
        return tuple(self._layers)

    def _window(self, mask: Tensor | None) -> int | None:
        rule: _Mask | None = getattr(mask, "baton_mask", None)
        if rule is None:
            raise cannot_run(self._architecture, "it makes masks of its own")
        try:
            return _window_of(rule)
        except (ValueError, RuntimeError, IndexError) as error:
            # a rule that looks at tensors of its own cannot be asked on the device "meta", and says nothing of interest
            why = f" ({error})" if isinstance(error, ValueError) else ""
            raise cannot_run(self._architecture, f"its masks are neither causal nor windows{why}") from error


def _window_of(rule: _Mask) -> int | None:
    """The window of a mask, None where it is causal and nothing else. Raises `ValueError` for another mask."""

    def sees(position: int, distance: int) -> bool:
        zero = torch.tensor(0)
        return bool(rule(zero, zero, torch.tensor(position), torch.tensor(position - distance)))

    if sees(_FAR, -1) or not sees(_FAR, 0):
        raise ValueError("tokens see what follows, or not themselves")
    window = None if sees(_FAR, _FAR) else _first_hidden(lambda distance: sees(_FAR, distance))
    seen = (1, _FAR // 3, _FAR) if window is None else (0, window // 2, window - 1)
    hidden = () if window is None else (window, window + 1, 2 * window)
    # a mask of chunks has borders that do not move with the position
    for position in (_FAR, _FAR + 1, _FAR + 3, _FAR + (window or 2) // 2, _FAR + (window or 2) - 1):
        sees_all = all(sees(position, distance) for distance in seen)
        if not sees_all or any(sees(position, distance) for distance in hidden):
            raise ValueError("what a token sees does not depend on the distance alone")
    return window


def _first_hidden(sees: Callable[[int], bool]) -> int:
    """The smallest distance that is not seen; 0 is seen, `_FAR` is not."""
    seen, hidden = 0, _FAR
    while hidden - seen > 1:
        middle = (seen + hidden) // 2
        seen, hidden = (middle, hidden) if sees(middle) else (seen, middle)
    return hidden


def _rule(told: dict[str, Any], head_dim: int) -> LayerRule:
    scale, usual = told.get("scaling"), 1.0 / math.sqrt(head_dim)
    own_scale = None if scale is None or math.isclose(scale, usual, rel_tol=1e-6) else float(scale)
    return LayerRule(own_scale, told.get("softcap"), told.get("s_aux"))
