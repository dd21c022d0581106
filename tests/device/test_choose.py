from __future__ import annotations

import pytest
import torch

from baton.device.choose import open_device, require_cuda, require_one_for_each
from baton.device.emulated import EmulatedDevice
from baton.device.host import HostDevice
from baton.wire.errors import InvalidSetting


def test_auto_is_the_host_where_torch_sees_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert isinstance(open_device("auto"), HostDevice)


def test_names_of_devices_that_are_always_there() -> None:
    assert isinstance(open_device("cpu"), HostDevice)
    assert isinstance(open_device("emulated"), EmulatedDevice)


@pytest.mark.parametrize("name", ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "CUDA", "cuda:1111", "cpu:0"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidSetting, match=r"--device .* is not one of auto, cpu, cuda, cuda:N"):
        open_device(name)


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "cuda:7"])
def test_a_torch_without_cuda_says_so_and_what_to_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(InvalidSetting, match=rf"--device {name}: this torch .* was built without CUDA; .*docs/gpu.md"):
        open_device(name)


def test_a_machine_without_a_device_is_told_apart_from_a_torch_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(InvalidSetting, match=r"sees no CUDA device \(CUDA_VISIBLE_DEVICES is ''\)"):
        require_cuda("cuda", 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(InvalidSetting, match="nvidia-smi"):
        require_cuda("cuda", 0)


def test_a_device_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    require_cuda("cuda:1", 1)
    with pytest.raises(InvalidSetting, match="--device cuda:2: there are only 2 CUDA devices"):
        require_cuda("cuda:2", 2)


def test_ranks_that_have_no_gpu_each_are_told_how_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,4,5")
    require_one_for_each(torch.device("cuda", 0), 4)
    require_one_for_each(torch.device("cuda", 2), 2)
    reason = r"4 ranks of a node need a GPU each, and this process sees 3 from cuda:1 on \(.* is 2,3,4,5\)"
    with pytest.raises(InvalidSetting, match=reason):
        require_one_for_each(torch.device("cuda", 1), 4)
