from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.device.base import Device, DeviceFailed
from baton.device.emulated import EmulatedDevice
from baton.device.host import HostDevice
from baton.engine.attention.base import LayerRule
from baton.engine.attention.choose import AttentionChoice, AttentionShape, Gpu, choose_attention, try_out
from baton.engine.attention.flashinfer import FlashInferAttention, FlashInferCalls
from baton.engine.attention.flashinfer_limits import float_workspace_bytes, int_workspace_bytes
from baton.engine.attention.paged_kv import PagedKv
from baton.engine.attention.torch_backend import TorchAttention
from baton.runtime.plugins import ATTENTION_BACKENDS
from baton.wire.errors import InvalidSetting
from baton.wire.layout import FP8_E4M3, KvLayout, LayerKv
from tests.engine.attention import flashinfer_stand_in as stand_in
from tests.installed_package import install

SHAPE = AttentionShape(
    num_heads=8,
    dtype=torch.bfloat16,
    layout=KvLayout.of_layers("bfloat16", 16, [LayerKv(2, 64), LayerKv(2, 64, window=16)]),
    max_blocks=8,
    max_graph_sequences=32,
)


POOL = PagedKv(SHAPE.layout, torch.zeros(4, SHAPE.layout.block_bytes // 2, dtype=torch.bfloat16))


class NoCuda(HostDevice):
    """Says that it is a GPU, as far as a choice asks."""

    torch_device = torch.device("cuda", 0)


CPU, CUDA = HostDevice(), NoCuda()


def hopper(_: torch.device) -> Gpu:
    return Gpu((9, 0), 132)


def loaded() -> FlashInferCalls:
    return stand_in.CALLS


def failing(error: Exception) -> FlashInferCalls:
    raise error


def untried(*_: object) -> None:
    """As if the step had been computed: there is no CUDA device here."""


@pytest.mark.parametrize("setting", ["auto", "flashinfer"])
def test_flashinfer_serves_what_it_can(setting: str) -> None:
    choice = choose_attention(setting, CUDA, SHAPE, load=loaded, look=hopper, attempt=untried)
    float_bytes = float_workspace_bytes(8, 2, 64, 132, 32)
    assert choice.name == "flashinfer"
    assert choice.workspace_bytes == float_bytes + int_workspace_bytes(2)
    assert isinstance(choice.build(POOL), FlashInferAttention)


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_torch_can_be_asked_for_anywhere(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    choice = choose_attention("torch", device, SHAPE, load=loaded, look=hopper)
    assert (choice.name, choice.workspace_bytes) == ("torch", 0)
    assert isinstance(choice.build(POOL), TorchAttention)
    assert not caplog.records


def test_without_a_gpu_nothing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert choose_attention("auto", CPU, SHAPE).name == "torch"
    assert not caplog.records


BROKEN = [
    (ModuleNotFoundError("No module named 'flashinfer'", name="flashinfer"), "flashinfer is not installed"),
    (ImportError("undefined symbol: x"), "ImportError: undefined symbol: x"),
    (OSError("libcuda.so.1: cannot open"), "OSError: libcuda.so.1"),
    (RuntimeError("versions differ"), "RuntimeError: versions differ"),
    (AttributeError("no fast_decode_plan"), "AttributeError: no fast_decode_plan"),
]


@pytest.mark.parametrize(("error", "words"), BROKEN)
def test_a_package_that_does_not_load_falls_back_with_one_line(
    error: Exception, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    choice = choose_attention("auto", CUDA, SHAPE, load=lambda: failing(error), look=hopper)
    assert choice.name == "torch"
    assert len(caplog.records) == 1
    assert words in caplog.text


@pytest.mark.parametrize(("error", "words"), BROKEN)
def test_a_package_that_does_not_load_cannot_be_asked_for(error: Exception, words: str) -> None:
    with pytest.raises(InvalidSetting, match=f"attention-backend flashinfer.*{words}"):
        choose_attention("flashinfer", CUDA, SHAPE, load=lambda: failing(error), look=hopper)


def test_a_kernel_that_cannot_be_built_falls_back_or_is_told(caplog: pytest.LogCaptureFixture) -> None:
    def attempt(*_: object) -> None:
        raise FileNotFoundError("no nvcc\n  anywhere")

    with caplog.at_level(logging.WARNING):
        assert choose_attention("auto", CUDA, SHAPE, load=loaded, look=hopper, attempt=attempt).name == "torch"
    assert len(caplog.records) == 1
    assert "cannot be built or run here: FileNotFoundError: no nvcc anywhere" in caplog.text
    with pytest.raises(InvalidSetting, match="no nvcc anywhere"):
        choose_attention("flashinfer", CUDA, SHAPE, load=loaded, look=hopper, attempt=attempt)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("full"), torch.AcceleratorError("illegal address"), DeviceFailed("lost")]
)
def test_a_device_that_fails_is_no_reason_for_slower_kernels(error: Exception) -> None:
    def attempt(*_: object) -> None:
        raise error

    with pytest.raises(type(error)):
        choose_attention("auto", CUDA, SHAPE, load=loaded, look=hopper, attempt=attempt)


def test_the_first_step_plans_and_runs_every_kernel_of_every_window(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, int]] = []

    def note(name: str) -> None:
        wrapper = getattr(stand_in.CALLS, name)
        run = wrapper.run

        def noted(self: Any, *arguments: Any, **options: Any) -> Any:
            ran.append((name, self._window_left))
            return run(self, *arguments, **options)

        monkeypatch.setattr(wrapper, "run", noted)

    note("BatchDecodeWithPagedKVCacheWrapper")
    note("BatchPrefillWithPagedKVCacheWrapper")
    tried: list[AttentionChoice] = []

    def attempt(choice: AttentionChoice, shape: AttentionShape, _: Device) -> None:
        tried.append(choice)
        try_out(choice, shape, EmulatedDevice())

    layout = KvLayout.of_layers("bfloat16", 16, [LayerKv(2, 64), LayerKv(2, 64, window=16)] * 2)
    shape = dataclasses.replace(SHAPE, layout=layout)
    assert choose_attention("auto", CUDA, shape, load=loaded, look=hopper, attempt=attempt) is tried[0]
    assert sorted(ran) == [
        ("BatchDecodeWithPagedKVCacheWrapper", -1),
        ("BatchDecodeWithPagedKVCacheWrapper", 15),
        ("BatchPrefillWithPagedKVCacheWrapper", -1),
        ("BatchPrefillWithPagedKVCacheWrapper", 15),
    ]


def test_a_shape_it_lacks_falls_back_before_anything_is_imported(caplog: pytest.LogCaptureFixture) -> None:
    shape = dataclasses.replace(SHAPE, layout=KvLayout.of_layers("bfloat16", 16, [LayerKv(2, 64), LayerKv(2, 80)]))
    choice = choose_attention("auto", CUDA, shape, load=lambda: pytest.fail("imported"), look=hopper)
    assert choice.name == "torch"
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "heads of size 80" in caplog.text
    with pytest.raises(InvalidSetting, match="heads of size 80"):
        choose_attention("flashinfer", CUDA, shape, load=loaded, look=hopper)


def test_scales_of_tokens_are_left_to_torch_on_a_gpu() -> None:
    layout = dataclasses.replace(SHAPE.layout, dtype=FP8_E4M3)
    shape = dataclasses.replace(SHAPE, layout=layout)
    assert choose_attention("auto", CUDA, shape, load=loaded, look=hopper).name == "torch"
    with pytest.raises(InvalidSetting, match="KV in fp8_e4m3 has a scale for each token and head"):
        choose_attention("flashinfer", CUDA, shape, load=loaded, look=hopper)


def test_flashinfer_cannot_be_asked_for_without_a_gpu() -> None:
    with pytest.raises(InvalidSetting, match="needs a CUDA device, not cpu"):
        choose_attention("flashinfer", CPU, SHAPE, load=loaded)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="'triton' is not one of auto, flashinfer, native, torch"):
        choose_attention("triton", CUDA, SHAPE)


GRANITE = """
from baton.engine.attention.choose import AttentionChoice
from baton.engine.attention.torch_backend import TorchAttention
from baton.wire.errors import InvalidSetting

def choose(device, shape):
    if shape.num_heads == 7:
        raise InvalidSetting("granite has no kernels for 7 heads")
    return AttentionChoice("granite", 4096, lambda paged: TorchAttention(paged, shape.rules))

def choose_nothing(device, shape):
    return "granite"

def build_nothing(device, shape):
    return AttentionChoice("granite", 0, lambda paged: paged)

def fail(device, shape):
    def build(paged):
        raise RuntimeError("no kernel image")
    return AttentionChoice("granite", 0, build)
"""


def choose_granite(folder: Path, patch: pytest.MonkeyPatch, made_by: str = "choose", **shape: Any) -> AttentionChoice:
    """What a package gives that makes its choice by this function."""
    install(folder, patch, GRANITE, {ATTENTION_BACKENDS: f"granite = {made_by}"})
    return choose_attention("granite", CPU, dataclasses.replace(SHAPE, **shape))


def test_the_backend_of_an_installed_package_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choice = choose_granite(tmp_path, monkeypatch)
    assert (choice.name, choice.workspace_bytes) == ("granite", 4096)
    assert isinstance(choice.build(POOL), TorchAttention)


@pytest.mark.parametrize(
    ("made_by", "reason"),
    [
        ("nothing_at_all", "cannot be imported: AttributeError: "),
        ("choose_nothing", "is no AttentionChoice: it has no build, name, workspace_bytes"),
        ("build_nothing", "is no AttentionBackend: it has no for_graph, plan, run"),
        ("fail", "cannot be used: RuntimeError: no kernel image"),
    ],
)
def test_what_is_no_backend_is_refused_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made_by: str, reason: str
) -> None:
    with pytest.raises(InvalidSetting, match=f"^--attention-backend granite of the package acme {reason}") as caught:
        choose_granite(tmp_path, monkeypatch, made_by)
    assert "\n" not in caught.value.message


def test_a_package_says_itself_what_it_does_not_compute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidSetting, match=r"^granite has no kernels for 7 heads$"):
        choose_granite(tmp_path, monkeypatch, num_heads=7)


def test_rules_that_are_batons_own_are_not_left_to_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidSetting, match="--attention-backend granite has no caps of scores, sinks, or states"):
        choose_granite(tmp_path, monkeypatch, rules=(LayerRule(cap=30.0),) * 2)
