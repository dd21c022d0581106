"""All ways to compute experts give what each token's own experts give it, whatever else is in the step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from baton.engine.models.linear_weights import PlainWeight
from baton.engine.models.ops.torch_ops import TorchOps
from baton.engine.models.parts.base import PartSetup
from baton.engine.models.parts.expert_products import (
    DenseProducts,
    ExpertGate,
    ExpertMatrices,
    GroupedProducts,
    LoopedProducts,
    Products,
    make_products,
)
from baton.engine.models.parts.linear import Linear
from baton.engine.models.shard import WHOLE

NUM_EXPERTS, SIZE, INNER, NUM_TOKENS, NUM_CHOSEN = 5, 16, 24, 9, 2


def gate(gate_up: Tensor) -> Tensor:
    size = gate_up.shape[-1] // 2
    return torch.mul(gate_up[:, :size].tanh(), gate_up[:, size:])


def experts(dtype: torch.dtype, *, has_biases: bool) -> list[ExpertMatrices]:
    chance = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=chance).div_(shape[-1] ** 0.5).to(dtype)

    def one() -> ExpertMatrices:
        matrices = PlainWeight(normal(2 * INNER, SIZE)), PlainWeight(normal(SIZE, INNER))
        biases = (normal(2 * INNER), normal(SIZE)) if has_biases else (None, None)
        return ExpertMatrices(*matrices, *biases)

    return [one() for _ in range(NUM_EXPERTS)]


def products(kind: str, made: list[ExpertMatrices], dtype: torch.dtype) -> Products:
    if kind == "grouped":
        return GroupedProducts(gate, made, dtype)
    found = make_products(ExpertGate(gate), made, PartSetup(dtype, torch.device("cpu"), TorchOps(), WHOLE))
    assert isinstance(found, LoopedProducts)
    pairs: list[tuple[Linear, Linear]] = list(found._pairs)
    return found if kind == "looped" else DenseProducts(gate, pairs)


@pytest.mark.parametrize("has_biases", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["looped", "dense", "grouped"])
def test_a_token_gets_the_weighed_sum_of_its_experts(kind: str, dtype: torch.dtype, has_biases: bool) -> None:
    made, chance = experts(dtype, has_biases=has_biases), torch.Generator().manual_seed(4)
    x = torch.randn(NUM_TOKENS, SIZE, generator=chance).to(dtype)
    # the last expert has no token
    chosen = torch.stack([torch.randperm(NUM_EXPERTS - 1, generator=chance)[:NUM_CHOSEN] for _ in range(NUM_TOKENS)])
    weights = torch.rand(NUM_TOKENS, NUM_CHOSEN, generator=chance)
    expected = torch.zeros(NUM_TOKENS, SIZE)
    for token, which in ((token, which) for token in range(NUM_TOKENS) for which in range(NUM_CHOSEN)):
        expert = made[int(chosen[token, which])]
        inner = gate(torch.nn.functional.linear(x[token, None], expert.gate_up.plain(dtype), expert.gate_up_bias))[0]
        out = torch.nn.functional.linear(inner, expert.down.plain(dtype), expert.down_bias)
        expected[token] += out.float() * weights[token, which]
    found = products(kind, made, dtype)(x, chosen, weights)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 4e-2}[dtype]
    torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", ["looped", "dense", "grouped"])
def test_a_token_does_not_depend_on_the_others(kind: str) -> None:
    compute = products(kind, experts(torch.float32, has_biases=True), torch.float32)
    x = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(1))
    chosen, weights = torch.tensor([[0, 1], [1, 4], [3, 0], [1, 0]]), torch.rand(4, 2)
    together = compute(x, chosen, weights)
    for token in range(4):
        own = slice(token, token + 1)
        torch.testing.assert_close(compute(x[own], chosen[own], weights[own]), together[own], rtol=1e-6, atol=1e-6)
