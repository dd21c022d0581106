"""What a KV block looks like in memory: the facts that two nodes must share before a byte may move between them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated

from wire.codec import Bounds, Length
from wire.errors import InvalidSetting, Refused

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_Count = Annotated[int, Bounds(1, 2**20)]


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shape of one block: [num_layers, 2 (K, V), num_kv_heads, block_size, head_dim] elements of `dtype`.

    A block holds all layers of `block_size` tokens in one contiguous region of `block_bytes` bytes.
    """

    dtype: Annotated[str, Length(16)]
    num_layers: _Count
    num_kv_heads: _Count
    head_dim: _Count
    block_size: _Count

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise InvalidSetting(f"KV dtype {self.dtype!r:.40} is not one of {', '.join(DTYPE_BYTES)}")

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.block_size * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def layer_ends(self) -> tuple[int, ...]:
        """Where each layer of a block ends, in bytes from the begin of the block."""
        layer_bytes = self.block_bytes // self.num_layers
        return tuple(layer_bytes * (layer + 1) for layer in range(self.num_layers))

    def require_same(self, other: KvLayout, whose: str) -> None:
        """Raise `Refused` naming both values of the first fact in which `other` (of `whose`) differs."""
        mine, theirs = asdict(self), asdict(other)
        for name, value in mine.items():
            if theirs[name] != value:
                raise Refused(f"KV layout differs: {name} is {value} here and {theirs[name]} at {whose}")
