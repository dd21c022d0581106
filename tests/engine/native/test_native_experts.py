"""One call of the CPU kernels computes what expert after expert does, bit for bit, whatever else is in the step."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from baton.engine.models.config import load_config, parse_config
from baton.engine.models.decoder import Decoder
from baton.engine.models.dummy import fill_with_noise
from baton.engine.models.expert_settings import ExpertSettings
from baton.engine.models.linear_weights import LoadedWeight, PlainWeight, QuantizedWeight
from baton.engine.models.mxfp4 import from_mxfp4
from baton.engine.models.ops.base import DecoderOps
from baton.engine.models.ops.native_experts import SILU, NativeProducts, clamped
from baton.engine.models.ops.native_ops import NativeOps
from baton.engine.models.ops.torch_ops import TorchOps
from baton.engine.models.parts.base import PartSetup
from baton.engine.models.parts.clamped_experts import clamped_gate
from baton.engine.models.parts.expert_products import (
    ExpertGate,
    ExpertMatrices,
    LoopedProducts,
    make_products,
    quantized_products,
)
from baton.engine.models.parts.routing import ExpertRouting
from baton.engine.models.quantization.while_loading import Int4, Int8
from baton.engine.models.shard import WHOLE
from tests.engine.models.families import make_model
from tests.engine.native.compiled import LEVELS, kernels, needs_kernels
from tests.launch.plan.model_configs import QWEN3_06B

pytestmark = needs_kernels
NUM_EXPERTS, SIZE, INNER, NUM_CHOSEN = 7, 96, 64, 3
Make = Callable[[Tensor], LoadedWeight]
LIMIT, SLOPE = 1.5, 1.702


def plain(matrix: Tensor) -> LoadedWeight:
    return PlainWeight(matrix)


def quantized(method: type[Int8], matrix: Tensor) -> LoadedWeight:
    return method().quantized(PlainWeight(matrix))


def mxfp4(matrix: Tensor) -> LoadedWeight:
    generator = torch.Generator().manual_seed(int(matrix.float().abs().sum() * 100))
    shape = (len(matrix), matrix.shape[1] // 32)
    blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
    return from_mxfp4(blocks, torch.randint(122, 125, shape, generator=generator, dtype=torch.uint8), matrix.dtype)


def e4m3(matrix: Tensor) -> LoadedWeight:
    scales = torch.full((len(matrix), 1), 0.7)
    return QuantizedWeight(matrix.to(torch.float8_e4m3fn), scales, None, matrix.shape[1], matrix.dtype)


def mixed(matrix: Tensor) -> LoadedWeight:
    """Some plain and some int4."""
    return plain(matrix) if int(matrix.float().abs().sum() * 100) % 2 else quantized(Int4, matrix)


KINDS: dict[str, Make] = {
    "plain": plain,
    "int8": partial(quantized, Int8),
    "int4": partial(quantized, Int4),
    "mxfp4": mxfp4,
    "e4m3": e4m3,
    "mixed": mixed,
}


def experts(
    make: Make, dtype: torch.dtype, *, has_biases: bool = False, inner: int = INNER, alternates: bool = False
) -> list[ExpertMatrices]:
    chance = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=chance).div_(shape[-1] ** 0.5).to(dtype)

    def one() -> ExpertMatrices:
        gate_up, down = make(normal(2 * inner, SIZE)), make(normal(SIZE, inner))
        gate_up_bias, down_bias = (normal(2 * inner), normal(SIZE)) if has_biases else (None, None)
        return ExpertMatrices(gate_up, down, gate_up_bias, down_bias, alternates)

    return [one() for _ in range(NUM_EXPERTS)]


def looped(ops: NativeOps, gate: ExpertGate, made: Sequence[ExpertMatrices], dtype: torch.dtype) -> LoopedProducts:
    """The same by the same operations, without the call for all experts."""
    setup = PartSetup(dtype, torch.device("cpu"), ops, WHOLE)
    found = make_products(ExpertGate(gate.compute), made, setup)
    assert isinstance(found, LoopedProducts)
    return found


def native(ops: NativeOps, gate: ExpertGate, made: Sequence[ExpertMatrices], dtype: torch.dtype) -> NativeProducts:
    found = make_products(gate, made, PartSetup(dtype, torch.device("cpu"), ops, WHOLE))
    assert isinstance(found, NativeProducts)
    return found


def routed(num_tokens: int, dtype: torch.dtype, num_experts: int = NUM_EXPERTS - 1) -> tuple[Tensor, Tensor, Tensor]:
    """x, and experts of each token, of which the last has none."""
    chance = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, SIZE, generator=chance).to(dtype)
    chosen = torch.stack([torch.randperm(num_experts, generator=chance)[:NUM_CHOSEN] for _ in range(num_tokens)])
    return x, chosen, torch.rand(num_tokens, NUM_CHOSEN, generator=chance)


def silu(ops: NativeOps) -> ExpertGate:
    return ExpertGate(ops.gate, SILU)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("dtype", "rounds"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.float16, False), (torch.bfloat16, True)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_one_call_is_expert_after_expert_bit_for_bit(
    level: str, kind: str, dtype: torch.dtype, *, rounds: bool
) -> None:
    ops = NativeOps(kernels(level, 2), rounds_activations=rounds)
    made = experts(KINDS[kind], dtype, has_biases=True)
    one_call, loop = native(ops, silu(ops), made, dtype), looped(ops, silu(ops), made, dtype)
    for num_tokens in (1, 2, 17, 230):
        given = routed(num_tokens, dtype)
        assert torch.equal(one_call(*given), loop(*given))
    assert ops.has_rounded == (rounds and kind in ("int8", "int4", "mxfp4", "mixed"))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_a_clamped_gate_is_that_of_torch(level: str, dtype: torch.dtype, tolerance: float) -> None:
    ops, gate = NativeOps(kernels(level, 1)), ExpertGate(partial(clamped_gate, LIMIT, SLOPE), clamped(LIMIT, SLOPE))
    made = experts(plain, dtype, has_biases=True, alternates=True)
    given = routed(9, dtype)
    expected = looped(ops, gate, made, dtype)(*given)
    torch.testing.assert_close(native(ops, gate, made, dtype)(*given), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", ["plain", "int4", "mxfp4"])
def test_a_token_does_not_depend_on_others_or_on_threads(level: str, kind: str) -> None:
    made = experts(KINDS[kind], torch.bfloat16)
    one, two = (NativeOps(kernels(level, count)) for count in (1, 2))
    x, chosen, weights = routed(40, torch.bfloat16)
    together = native(two, silu(two), made, torch.bfloat16)(x, chosen, weights)
    alone = native(one, silu(one), made, torch.bfloat16)
    for first, end in ((0, 1), (1, 2), (7, 14), (39, 40)):
        rows = slice(first, end)
        assert torch.equal(alone(x[rows], chosen[rows], weights[rows]), together[rows])


@pytest.mark.parametrize("level", LEVELS)
def test_one_expert_may_have_all_rows(level: str) -> None:
    ops, dtype = NativeOps(kernels(level, 2)), torch.bfloat16
    made = experts(plain, dtype)
    x, _, weights = routed(500, dtype)
    chosen = torch.full((500, 1), 4)
    given = (x, chosen, weights[:, :1].contiguous())
    assert torch.equal(native(ops, silu(ops), made, dtype)(*given), looped(ops, silu(ops), made, dtype)(*given))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("inner", [5, 33, 70])
def test_sizes_that_fill_no_panel_and_no_tokens(level: str, inner: int) -> None:
    ops, dtype = NativeOps(kernels(level, 1)), torch.float32
    made = experts(plain, dtype, inner=inner, has_biases=True)
    one_call, loop = native(ops, silu(ops), made, dtype), looped(ops, silu(ops), made, dtype)
    for num_tokens in (1, 9):
        given = routed(num_tokens, dtype)
        assert torch.equal(one_call(*given), loop(*given))
    x, chosen, weights = routed(1, dtype)
    assert one_call(x[:0], chosen[:0], weights[:0]).shape == (0, SIZE)


def test_rows_of_x_may_lie_any_distance_apart() -> None:
    ops, dtype = NativeOps(kernels(LEVELS[0], 1)), torch.bfloat16
    compute = native(ops, silu(ops), experts(plain, dtype), dtype)
    x, chosen, weights = routed(5, dtype)
    apart = torch.zeros(5, SIZE + 3, dtype=dtype)
    apart[:, :SIZE] = x
    assert torch.equal(compute(apart[:, :SIZE], chosen, weights), compute(x, chosen, weights))


def test_experts_whose_inputs_have_another_order_are_looped() -> None:
    ops = NativeOps(kernels(LEVELS[0], 1))
    setup = PartSetup(torch.float32, torch.device("cpu"), ops, WHOLE)
    weights = [([each.gate_up], [each.down]) for each in experts(KINDS["int8"], torch.float32)]
    assert isinstance(quantized_products(silu(ops), weights, setup), NativeProducts)
    ((last, *_), down) = weights[-1]
    assert isinstance(last, QuantizedWeight)
    ordered = QuantizedWeight(last.codes, last.scales, None, last.group_size, last.dtype, torch.arange(SIZE))
    assert isinstance(quantized_products(silu(ops), [*weights[:-1], ([ordered], down)], setup), LoopedProducts)


ROUTINGS = {
    "mixtral": ExpertSettings(8, 2, 1, (), normalizes=True),
    "olmoe": ExpertSettings(64, 8, 1, ()),
    "qwen3": ExpertSettings(128, 8, 1, (), normalizes=True),
    "glm": ExpertSettings(16, 4, 1, (), "sigmoid", True, 2.5, True, 4, 2, 2, has_float32_routing=True),
    "deepseek-v2": ExpertSettings(
        12, 3, 1, (), scaling=16.0, num_groups=3, num_chosen_groups=2, has_float32_routing=True
    ),
    "gpt-oss": ExpertSettings(32, 4, 1, (), "softmax_of_chosen", is_clamped=True),
}


def routing(settings: ExpertSettings, dtype: torch.dtype, ops: DecoderOps) -> ExpertRouting:
    """Loaded with the same weights for any operations, and packed."""
    config = parse_config({**QWEN3_06B, "hidden_size": SIZE})
    made = ExpertRouting("r", "t", settings, config, PartSetup(dtype, torch.device("cpu"), ops, WHOLE))
    chance = torch.Generator().manual_seed(5)
    for parameter in made.parameters():
        parameter.tensor.normal_(0, 0.3, generator=chance)
    made.pack()
    return made


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ROUTINGS)
def test_experts_are_chosen_as_torch_chooses_them(level: str, family: str, dtype: torch.dtype) -> None:
    settings, tolerance = ROUTINGS[family], {torch.float32: 1e-5}.get(dtype, 2e-2)
    x = torch.randn(50, SIZE, generator=torch.Generator().manual_seed(1)).to(dtype)
    chosen, weights = routing(settings, dtype, NativeOps(kernels(level, 2)))(x)
    expected, factors = routing(settings, dtype, TorchOps())(x)
    torch.testing.assert_close(weights, factors.to(dtype), rtol=tolerance, atol=tolerance)
    # scores that are equal, or nearly so, may be in another order
    same = (chosen.sort(dim=1)[0] == expected.sort(dim=1)[0]).all(dim=1)
    assert same.float().mean() >= {torch.float32: 1.0}.get(dtype, 0.9)
    if dtype == torch.float32:
        assert torch.equal(chosen, expected)


@pytest.mark.parametrize("level", LEVELS)
def test_logits_that_are_no_numbers_choose_experts_that_exist(level: str) -> None:
    x = torch.full((3, SIZE), torch.nan)
    chosen, _ = routing(ROUTINGS["glm"], torch.float32, NativeOps(kernels(level, 1)))(x)
    assert ((chosen >= 0) & (chosen < ROUTINGS["glm"].num_experts)).all()
    assert all(len(set(each)) == len(each) for each in chosen.tolist())


def test_nothing_keeps_what_was_loaded_once_it_is_packed(tmp_path: Path) -> None:
    make_model(tmp_path, "gpt-oss")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    decoder = Decoder(load_config(tmp_path), torch.bfloat16, "cpu", NativeOps(kernels(LEVELS[0], 1)))
    weak: Callable[[torch.UntypedStorage], Any] = StorageWeakRef
    loaded = [
        weak(parameter.tensor.untyped_storage())
        for parameter in decoder.parameters()
        if parameter.name.endswith(("_blocks", "_scales"))
    ]
    fill_with_noise(decoder)
    assert loaded
    assert all(each.expired() for each in loaded)
