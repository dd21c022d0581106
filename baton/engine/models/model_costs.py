"""What a model's tokens cost to compute: multiplications and additions by its config, whatever its weights lie in.

Owns the counting, for rooflines and for what a node expects of its steps before they have told. Bytes are not counted
here: those are what the served parts say (`baton.launch.plan.rank_size`). Norms, rotations and activations are left
out, as is usual: they are a few in a thousand.
"""

from __future__ import annotations

from baton.engine.models.config import ModelConfig

_FAR = 2048
"""Where a prompt is long enough for its pairs to matter, and windows have begun to bound them."""
_ATTENTION_RATE = 0.7
"""Operations per second of attention over those of products; Baton's CPU kernels reach 0.65 to 0.8."""


def product_flop_per_token(config: ModelConfig) -> float:
    """Floating-point operations of all layers' products for one token: two for each weight that it meets. The head is
    `head_flop`."""
    return 2.0 * sum(_attention_weights(config) + _mlp_weights(config, layer) for layer in range(config.num_layers))


def head_flop(config: ModelConfig) -> float:
    """Floating-point operations of the logits of one token. A prompt needs those of its last token only."""
    return 2.0 * config.vocab_size * config.hidden_size


def attention_flop(config: ModelConfig, position: int) -> float:
    """Floating-point operations of one token's scores and sums in all layers, with `position` tokens before it."""
    latent = config.latent
    if latent is None:
        per_token = 4.0 * config.num_heads * config.head_dim
    else:
        per_token = 2.0 * config.num_heads * (2 * latent.kv_rank + latent.rope_dim)
    return per_token * sum(min(position + 1, window or position + 1) for window in config.windows)


def pair_in_tokens(config: ModelConfig) -> float:
    """The cost of one pair of tokens in attention, as a share of the cost of a token by itself: a few in ten
    thousand."""
    return attention_flop(config, _FAR) / (_FAR + 1) / (_ATTENTION_RATE * product_flop_per_token(config))


def share_of_experts(config: ModelConfig, num_tokens: int) -> float:
    """The share of the experts' weights that a step of so many tokens is expected to read, if tokens choose evenly."""
    experts = config.experts
    if experts is None:
        return 1.0
    return 1.0 - (1.0 - experts.num_chosen / experts.num_experts) ** num_tokens


def _attention_weights(config: ModelConfig) -> int:
    size, heads, latent = config.hidden_size, config.num_heads, config.latent
    if latent is None:
        return size * config.head_dim * (2 * heads + 2 * config.num_kv_heads)
    query_dim = latent.nope_dim + latent.rope_dim
    queries = latent.q_rank * (size + heads * query_dim) if latent.q_rank else size * heads * query_dim
    stored = size * (latent.kv_rank + latent.rope_dim)
    expanded = heads * latent.kv_rank * (latent.nope_dim + latent.v_dim)
    return queries + stored + expanded + heads * latent.v_dim * size


def _mlp_weights(config: ModelConfig, layer: int) -> int:
    size, experts = config.hidden_size, config.experts
    if experts is None or not experts.sparse_layers[layer]:
        return (3 if config.mlp == "gated" else 2) * size * config.intermediate_size
    chosen = 3 * size * (experts.num_chosen * experts.intermediate_size + experts.shared_size)
    return chosen + size * experts.num_experts
