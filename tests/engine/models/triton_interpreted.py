"""What the Triton kernels compute, with Triton's interpreter in place of a GPU. Run by test_triton_ops.py in a process
of its own: the interpreter is chosen when triton is imported.

The interpreter rounds to float32 and float16 as a GPU does, and cuts off what bfloat16 has no room for: there the
comparison is loose. The kernels are the same for all dtypes, so that float16 tells where they round.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.engine.models.config import load_config
from baton.engine.models.decoder import Decoder
from baton.engine.models.loading import load_weights
from baton.engine.models.ops.torch_ops import TorchOps
from baton.engine.models.ops.triton_ops import TritonOps
from tests.checkpoints import make_checkpoint
from tests.engine.models.dense_attention import DenseAttention
from tests.engine.models.op_cases import DTYPES, EPS, assert_same_roundings, random, random_rotation

LENGTHS = {torch.float32: (0, 3), torch.float16: (0, 1, 3), torch.bfloat16: (3,)}


def lengths(dtype: torch.dtype, num_elements: int) -> tuple[int, ...]:
    """Numbers of tokens of so many elements. The interpreter takes seconds for many large ones, and they are all
    alike."""
    if num_elements >= 1000:
        return (2,)
    return (*LENGTHS[dtype], 33) if num_elements < 70 and dtype == torch.float16 else LENGTHS[dtype]


def assert_same(actual: Tensor, expected: Tensor) -> None:
    assert actual.is_contiguous()
    if actual.dtype == torch.bfloat16:
        torch.testing.assert_close(actual, expected, rtol=2**-5, atol=2**-4)
    else:
        assert_same_roundings(actual, expected)


@pytest.mark.parametrize(
    ("size", "dtype"),
    [(64, torch.float16), (64, torch.float32), (80, torch.float16), (1536, torch.bfloat16), (4096, torch.float16)],
)
@pytest.mark.parametrize("has_delta", [True, False])
def test_add_norm(dtype: torch.dtype, size: int, has_delta: bool) -> None:
    for num_tokens in lengths(dtype, size):
        residual, weight = random(num_tokens, size, dtype=dtype, gap=8), random(1, size, dtype=dtype, seed=2)[0]
        expected_sum = residual.clone()
        delta = random(num_tokens, size, dtype=dtype, seed=1, gap=size) if has_delta else None
        expected = TorchOps().add_norm(expected_sum, delta, weight, EPS)
        assert_same(TritonOps().add_norm(residual, delta, weight, EPS), expected)
        if has_delta and dtype != torch.bfloat16:
            assert torch.equal(residual, expected_sum)
        torch.testing.assert_close(residual, expected_sum, rtol=2**-7, atol=0)


@pytest.mark.parametrize(
    ("num_heads", "head_dim", "dtype"),
    [
        (1, 16, torch.float32),
        (6, 2, torch.float16),
        (3, 64, torch.bfloat16),
        (5, 80, torch.float16),
        (40, 128, torch.float16),
        (7, 256, torch.float32),
    ],
)
@pytest.mark.parametrize("has_norm", [True, False])
def test_norm_rotate(dtype: torch.dtype, num_heads: int, head_dim: int, has_norm: bool) -> None:
    weight = random(num_heads, head_dim, dtype=dtype, seed=2) if has_norm else None
    for num_tokens in lengths(dtype, num_heads * head_dim):
        x = random(num_tokens, num_heads, head_dim, dtype=dtype, gap=2 * head_dim)
        rotation = random_rotation(num_tokens, head_dim, dtype)
        expected = TorchOps().norm_rotate(x, weight, EPS, rotation)
        assert_same(TritonOps().norm_rotate(x, weight, EPS, rotation), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 80, 1536, 2500])
def test_gate(dtype: torch.dtype, size: int) -> None:
    for num_tokens in lengths(dtype, size):
        gate_up = random(num_tokens, 2 * size, dtype=dtype, gap=16).mul_(4)
        assert_same(TritonOps().gate(gate_up), TorchOps().gate(gate_up))


def test_gate_far_from_zero() -> None:
    gate_up = torch.tensor([[-1000.0, -100.0, -90.0, 90.0, 100.0, 1000.0, *[2.0] * 6]])
    with pytest.warns(RuntimeWarning, match="overflow"):  # numpy's, of exp
        gated = TritonOps().gate(gate_up)
    torch.testing.assert_close(gated, TorchOps().gate(gate_up))


@torch.inference_mode()
def test_a_decoder_gives_the_same_logits(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3", changes={"num_hidden_layers": 2})
    config = load_config(folder)
    chunks = [5, 1, 8]
    tokens = torch.randint(0, 300, (sum(chunks),), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(length) for length in chunks])
    results = []
    for ops in (TorchOps(), TritonOps()):
        decoder = Decoder(config, torch.float32, "cpu", ops)
        load_weights(folder, decoder)
        hidden = decoder.forward(tokens, positions, DenseAttention(chunks, config.windows))
        results.append(decoder.logits(hidden[-3:]))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)
    assert results[0].std() > 0.1
