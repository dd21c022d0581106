"""Opens the device of the setting `--device`, and the stream that transfers use on a device.

Owns the names, and the errors for devices that this machine does not have. The modules of a device are imported when it
is chosen.
"""

from __future__ import annotations

import os
import re

import torch

from baton.device.base import Device
from baton.device.stream import HostStream, Stream
from baton.wire.errors import InvalidSetting

AUTO, CPU, CUDA, EMULATED = "auto", "cpu", "cuda", "emulated"
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
_CUDA_NAME = re.compile(r"cuda(:(\d{1,3}))?")


def open_device(name: str, place: int = 0) -> Device:
    """Open a device by name. Raises `InvalidSetting`.

    `name`: `auto` (a GPU where torch sees one), `cpu`, `cuda`, `cuda:N`, or `emulated` (the host's cores behind the
    code paths of a GPU, for tests). `place`: the number of the rank among those of a node on this machine. Each rank
    has a GPU of its own, from the named one on.
    """
    if name == CPU or (name == AUTO and not torch.cuda.is_available()):
        from baton.device.host import HostDevice

        return HostDevice()
    if name == EMULATED:
        from baton.device.emulated import EmulatedDevice

        return EmulatedDevice()
    match = _CUDA_NAME.fullmatch(CUDA if name == AUTO else name)
    if match is None:
        raise InvalidSetting(f"--device {name!r:.50} is not one of auto, cpu, cuda, cuda:N")
    index = int(match[2] or 0) + place
    require_cuda(name, index)
    from baton.device.cuda import CudaDevice

    return CudaDevice(index)


def open_stream(device: torch.device) -> Stream:
    """A stream of its own for transfers of tensors on that device."""
    if device.type != "cuda":
        return HostStream()
    from baton.device.cuda_stream import CudaStream

    return CudaStream(device)


def require_one_for_each(first: torch.device, count: int) -> None:
    """Raise `InvalidSetting` unless so many ranks have a GPU each, from `first` on."""
    num_left = torch.cuda.device_count() - (first.index or 0)
    if count > num_left:
        raise InvalidSetting(
            f"{count} ranks of a node need a GPU each, and this process sees {num_left} from {first} on "
            f"({VISIBLE_DEVICES} is {os.environ.get(VISIBLE_DEVICES, 'not set')})"
        )


def require_cuda(name: str, index: int) -> None:
    """Raise `InvalidSetting` unless torch sees the CUDA device `index`."""
    if torch.version.cuda is None:
        raise InvalidSetting(
            f"--device {name}: this torch ({torch.__version__}) was built without CUDA; "
            "install a CUDA build of torch (see docs/gpu.md), or use --device cpu"
        )
    if not torch.cuda.is_available():
        visible = os.environ.get(VISIBLE_DEVICES)
        hint = f"{VISIBLE_DEVICES} is {visible!r}" if visible is not None else "does `nvidia-smi` list one?"
        raise InvalidSetting(f"--device {name}: torch sees no CUDA device ({hint}); use --device cpu without one")
    if index >= torch.cuda.device_count():
        raise InvalidSetting(
            f"--device {name}: there are only {torch.cuda.device_count()} CUDA devices, counted from 0"
        )
