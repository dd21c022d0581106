"""How many bytes a decode step has to read, and how many operations a prompt takes: formulas of a model's shape.

Owns the formulas. Knows no tensors and no time. Both count what cannot be avoided: norms, rotations, softmax, the
residual stream and the embedding rows of a step's tokens are left out, as they are small beside the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from baton.engine.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product of a step: `num_rows` tokens times weights [num_out, num_in], in `count` layers."""

    name: str
    num_rows: int
    num_in: int
    num_out: int
    count: int

    @property
    def flop(self) -> int:
        """Operations over all layers; a multiplication and an addition are two."""
        return 2 * self.num_rows * self.num_in * self.num_out * self.count


@dataclass(frozen=True, slots=True)
class ModelShapes:
    """The sizes that the formulas need. `element_bytes`: of a weight, and of an element of KV."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    windows: tuple[int | None, ...]
    element_bytes: int

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.element_bytes

    @property
    def num_linear_parameters(self) -> int:
        """Weights of all layers' products, without the head."""
        return sum(product.num_in * product.num_out * product.count for product in self.layer_products(1))

    @property
    def decode_weight_bytes(self) -> int:
        """What every decode step reads whatever its batch: the layers' products and the head."""
        return (self.num_linear_parameters + self.vocab_size * self.hidden_size) * self.element_bytes

    def kv_read_bytes(self, context_len: int) -> int:
        """KV that one token reads when it sees `context_len` tokens, itself included; layers with a window see less."""
        per_layer = 2 * self.num_kv_heads * self.head_dim * self.element_bytes
        return sum(per_layer * min(context_len, window or context_len) for window in self.windows)

    def decode_bytes(self, context_lens: list[int]) -> int:
        """What a step that decodes one token of each of these contexts has to read."""
        return self.decode_weight_bytes + sum(map(self.kv_read_bytes, context_lens))

    def prefill_flop(self, num_tokens: int) -> int:
        """2 P T + 2 L Hq D T^2 + 2 V E: layers' products, causal attention of a whole prompt, the last token's logits.

        A layer with a window w < T attends to w T - w^2 / 2 pairs instead of T^2 / 2.
        """
        products = sum(product.flop for product in self.prefill_products(num_tokens))
        return products + 2 * self.num_heads * self.head_dim * sum(_twice_seen(num_tokens, w) for w in self.windows)

    def layer_products(self, num_rows: int) -> list[Product]:
        """The products of all layers, fused as the engine computes them."""
        query_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        sizes = {
            "qkv": (self.hidden_size, query_size + 2 * kv_size),
            "o": (query_size, self.hidden_size),
            "gate_up": (self.hidden_size, 2 * self.intermediate_size),
            "down": (self.intermediate_size, self.hidden_size),
        }
        return [Product(name, num_rows, *size, self.num_layers) for name, size in sizes.items()]

    def prefill_products(self, num_tokens: int) -> list[Product]:
        """The products of a prompt: every token goes through the layers, the last one through the head."""
        return [*self.layer_products(num_tokens), Product("head", 1, self.hidden_size, self.vocab_size, 1)]


def shapes_of(config: ModelConfig, element_bytes: int) -> ModelShapes:
    """The shapes of a checkpoint that is computed in a dtype of so many bytes."""
    names = [field.name for field in fields(ModelShapes) if field.name != "element_bytes"]
    return ModelShapes(**{name: getattr(config, name) for name in names}, element_bytes=element_bytes)


def _twice_seen(num_tokens: int, window: int | None) -> int:
    """Twice the pairs of a token and one that it sees, by area: T^2, or 2 w T - w^2 with a window."""
    if window is None or window >= num_tokens:
        return num_tokens**2
    return 2 * window * num_tokens - window**2
