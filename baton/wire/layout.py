"""The layout of a KV block in memory, on which two nodes must agree before a byte may move between them.

A block holds `block_size` tokens of all layers in one contiguous region: layer after layer in the model's order, so
that what is computed first lies first. Layers that compute drafts lie behind the model's. Layers may differ in what
they store of a token. Those that store the same make a group; a model whose layers are all alike has one.

A head of a layer has its `block_size` keys (or values) next to each other. In FP8_E4M3 they are codes of 8 bits, and
behind them lie `block_size` scales, a byte each: scale s of a token stands for 2^(s - 127), and multiplies its codes.
So a scale goes wherever its block goes.

Owns the arithmetic of bytes. Knows no tensors: `baton.engine.attention.paged_kv` makes views of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from itertools import accumulate
from math import lcm
from typing import Annotated, Any

from baton.wire.codec import Bounds, Length
from baton.wire.errors import InvalidSetting, Refused

FP8_E4M3 = "fp8_e4m3"
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, FP8_E4M3: 1}
KEY_VALUE, SHORT_KEY_VALUE, LATENT, STATE = "key_value", "key_value_short", "latent", "state"
MAX_LAYERS = 1024
_MAX_GROUPS = 64
_NUM_PLANES = {KEY_VALUE: 2, SHORT_KEY_VALUE: 2, LATENT: 1, STATE: 1}
_Count = Annotated[int, Bounds(1, 2**20)]
_Layer = Annotated[int, Bounds(0, MAX_LAYERS - 1)]


@dataclass(frozen=True, slots=True)
class LayerKv:
    """The KV that one layer stores for each token, and how far back its attention reads. `kind` says what is stored:

    - `key_value`: a key and a value of `head_dim` elements for each of `num_kv_heads` heads.
    - `key_value_short`: the same with keys that were rotated for short sequences, by a model that has two rotations.
    - `latent`: one vector that is the key, and whose begin is the value, of all heads.
    - `state`: nothing of a token. A block has one state of `num_kv_heads` x `head_dim` elements, that of the sequence
      behind the last token which was stored in it.

    The last `num_carried` elements of a state are the matrices that heads carry on, one head after another. They take
    as many whole rows of `head_dim` as they need. The rows before them are the last inputs of a convolution, with an
    element for each channel. A rank has neighbouring channels, and the matrices of its heads.

    `window`: a token attends to at most this number of tokens, itself included; None: to all before it.
    """

    num_kv_heads: _Count
    head_dim: _Count
    window: Annotated[int, Bounds(1, 2**53)] | None = None
    kind: Annotated[str, Length(16)] = KEY_VALUE
    num_carried: Annotated[int, Bounds(0, 2**40)] = 0

    def __post_init__(self) -> None:
        if self.kind not in _NUM_PLANES:
            raise InvalidSetting(f"KV kind {self.kind!r:.40} is not one of {', '.join(_NUM_PLANES)}")
        if self.num_carried and (self.kind != STATE or self.num_carried > self.elements_per_token):
            raise InvalidSetting("a layer carries on more than its state")

    @property
    def num_planes(self) -> int:
        """Tensors of [num_kv_heads, block_size, head_dim] that a layer has in a block: keys, then values."""
        return _NUM_PLANES[self.kind]

    @property
    def num_input_rows(self) -> int:
        """Rows of a state that are inputs of a convolution."""
        return self.num_kv_heads + -self.num_carried // self.head_dim

    @property
    def elements_per_token(self) -> int:
        """Elements that one token takes in one layer; those of the whole block for a state."""
        return self.num_planes * self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class KvGroup:
    """The layers, by their numbers in the model, that store the same of each token."""

    layers: Annotated[tuple[_Layer, ...], Length(MAX_LAYERS)]
    kv: LayerKv


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shape of one block: for each layer of the model [num_planes, num_kv_heads, block_size, head_dim] elements of
    `dtype`, or a state; see `LayerKv`. Every layer is in exactly one group."""

    dtype: Annotated[str, Length(16)]
    block_size: _Count
    groups: Annotated[tuple[KvGroup, ...], Length(_MAX_GROUPS)]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise InvalidSetting(f"KV dtype {self.dtype!r:.40} is not one of {', '.join(DTYPE_BYTES)}")
        grouped = sorted(layer for group in self.groups for layer in group.layers)
        if not grouped or grouped != list(range(len(grouped))):
            raise InvalidSetting("KV groups must have every layer of the model exactly once")
        others = {group.kv.kind for group in self.groups if group.kv.num_planes != 2}
        if self.has_scales and others:
            raise InvalidSetting(f"KV in {self.dtype} is for keys and values: this model stores a {min(others)}")

    @classmethod
    def of_layers(cls, dtype: str, block_size: int, layers: Iterable[LayerKv]) -> KvLayout:
        """The layout of a model whose layers, in its order, store `layers`. Raises `InvalidSetting`."""
        grouped: dict[LayerKv, list[int]] = {}
        for number, kv in enumerate(layers):
            grouped.setdefault(kv, []).append(number)
        return cls(dtype, block_size, tuple(KvGroup(tuple(numbers), kv) for kv, numbers in grouped.items()))

    def followed_by(self, layers: Iterable[LayerKv]) -> KvLayout:
        """This layout with `layers` behind its own. Raises `InvalidSetting`."""
        return self.of_layers(self.dtype, self.block_size, (*self.layers, *layers))

    @property
    def num_layers(self) -> int:
        """The number of layers of the model."""
        return sum(len(group.layers) for group in self.groups)

    @property
    def layers(self) -> tuple[LayerKv, ...]:
        """The KV of each layer, in the model's order."""
        stored = {number: group.kv for group in self.groups for number in group.layers}
        return tuple(stored[number] for number in range(len(stored)))

    @property
    def has_scales(self) -> bool:
        """Whether a key or a value is codes with a scale."""
        return self.dtype == FP8_E4M3

    @property
    def has_states(self) -> bool:
        """Whether some layer stores a state in each block."""
        return any(group.kv.kind == STATE for group in self.groups)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return sum(len(group.layers) * self.layer_bytes(group.kv) for group in self.groups)

    @property
    def layer_ends(self) -> tuple[int, ...]:
        """The end of each layer in a block, in bytes from the begin of the block."""
        return tuple(accumulate(self.layer_bytes(kv) for kv in self.layers))

    def layer_bytes(self, kv: LayerKv) -> int:
        """Bytes that a layer which stores `kv` takes in a block."""
        elements = kv.num_planes * kv.num_kv_heads * self.head_elements(kv)
        if kv.kind == STATE:
            # filled up, so that the rows of one head's tokens in all blocks lie in a grid
            rows = lcm(*(self.block_size * group.kv.head_dim for group in self.groups if group.kv.kind != STATE))
            elements = -(-kv.elements_per_token // rows) * rows
        return elements * DTYPE_BYTES[self.dtype]

    def head_elements(self, kv: LayerKv) -> int:
        """Elements that the keys, or the values, of one head of such a layer take in a block."""
        return self.block_size * (kv.head_dim + self.has_scales)

    def require_same(self, other: KvLayout, whose: str) -> None:
        """Raise `Refused` naming both values of the first fact in which `other` (of `whose`) differs."""
        for name in ("dtype", "block_size", "num_layers"):
            _require_same(name, getattr(self, name), getattr(other, name), whose)
        for number, (mine, theirs) in enumerate(zip(self.layers, other.layers, strict=True)):
            for field in fields(LayerKv):
                fact = f"{field.name} of layer {number}"
                _require_same(fact, getattr(mine, field.name), getattr(theirs, field.name), whose)


def _require_same(fact: str, mine: Any, theirs: Any, whose: str) -> None:
    if mine != theirs:
        raise Refused(f"KV layout differs: {fact} is {mine} here and {theirs} at {whose}")
