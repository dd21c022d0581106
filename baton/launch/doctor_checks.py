"""What `baton doctor` looks at, in its order: first what costs nothing, then packages, torch last.

Owns what is enough and what is said where it is not. Invariant: nothing that may be missing or broken is imported
before its own check is run.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import resource
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

OK, NOTE, MISSING = "ok", "note", "missing"
ROUTER_PORT, CONTROL_PORT = 8000, 8001
MIN_FREE_BYTES, MIN_SHARED_BYTES = 2**30, 2**30
MIN_OPEN_FILES = 8192
CPU_FEATURES = (
    *("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512dq", "avx512vl"),
    *("avx512_vnni", "avx512_bf16", "avx512_vbmi", "asimddp"),
)
"""Those that the kernels use, as Linux names them."""
_GIB, _MORE_SHARED = 2**30, "mount -o remount,size=8G /dev/shm, or docker run --shm-size 8g"


class Found(NamedTuple):
    """The outcome of a look, and the command that helps."""

    state: str
    text: str
    fix: str = ""


class Check(NamedTuple):
    """Something to look at. `is_needed`: there is no serving when it is broken, which `fix` mends."""

    name: str
    look: Callable[[], Found]
    is_needed: bool = False
    fix: str = ""


def find_python() -> Found:
    """The interpreter; an older one than Baton needs does not come as far as this."""
    return Found(OK, f"{platform.python_version()}, {platform.system()} {platform.machine()}")


def find_processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> Found:
    """The cores that this process may use, and what of theirs the kernels use."""
    from baton.launch.placement import find_cpus

    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    features = " ".join(name for name in CPU_FEATURES if name in flags) or "none of the features that kernels ask for"
    return Found(OK, f"{find_cpus().num_usable} cores to use; {features}")


def find_memory() -> Found:
    """The memory of the machine or the container."""
    from baton.device.host_memory import read_host_memory

    memory = read_host_memory()
    return Found(OK if memory.free >= MIN_FREE_BYTES else NOTE, str(memory))


def find_shared_memory(folder: str = "/dev/shm") -> Found:
    """The room for KV that nodes of this machine hand over."""
    if not Path(folder).is_dir():
        return Found(NOTE, f"there is no {folder}: nodes of this machine hand over by zmq, which is slower")
    usage = shutil.disk_usage(folder)
    text = f"{usage.free / _GIB:.2f} of {usage.total / _GIB:.2f} GiB are free in {folder}"
    if usage.free >= MIN_SHARED_BYTES:
        return Found(OK, text)
    return Found(NOTE, f"{text}; a KV pool that does not fit is handed over by zmq, which is slower", _MORE_SHARED)


def find_open_files() -> Found:
    """The limit of open files, which the router raises as far as it may."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= MIN_OPEN_FILES:
        return Found(OK, "no limit" if hard == resource.RLIM_INFINITY else f"{hard} at most")
    return Found(
        NOTE, f"{hard} at most, which is the limit of connections", f"ulimit -Hn {MIN_OPEN_FILES * 2}, as root"
    )


def find_port(port: int, flag: str) -> Found:
    """Whether a port is free here."""
    from baton.launch.ports import listening
    from baton.wire.errors import InvalidSetting

    try:
        with listening("127.0.0.1", port, flag):
            return Found(OK, "free")
    except InvalidSetting:
        return Found(NOTE, f"in use, by a Baton that runs or another program; choose another with {flag}")


def find_hub() -> Found:
    """Where checkpoints of the hub are, and whether the network is needed."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE)
    there = f"{len(list(folder.glob('models--*')))} models are in {folder}"
    if constants.HF_HUB_OFFLINE:
        return Found(NOTE, f"{there}; no other can be had: HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE")
    return Found(OK, f"{there}; others need the network, from {constants.ENDPOINT}. Folders and the demo do not")


def find_package(module: str, distribution: str) -> Found:
    """A package that serving needs. Raises whatever its import raises."""
    importlib.import_module(module)
    return Found(OK, importlib.metadata.version(distribution))


def find_extra(module: str, distribution: str, use: str, fix: str) -> Found:
    """A package that only some use, for what, and what installs it. Raises whatever its import raises."""
    try:
        importlib.import_module(module)
        return Found(OK, f"{importlib.metadata.version(distribution)}, for {use}")
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        return Found(NOTE, f"not installed, for {use}", fix)


def find_kernels() -> Found:
    """The compiled kernels, and the levels of them that this processor runs."""
    from baton.engine.native.library import levels, load_library

    try:
        return Found(OK, f"compiled; this processor runs {', '.join(levels(load_library()))}")
    except OSError as error:
        return Found(NOTE, f"torch computes on the CPU, which is slower: {error}", "apt install g++, and install again")


def find_gpus() -> Found:
    """The GPUs that torch sees."""
    from baton.device.cuda_context import visible_gpus
    from baton.launch.placement import find_devices

    if gpus := visible_gpus():
        return Found(OK, "; ".join(f"{name}, {num_bytes / _GIB:.0f} GiB" for name, num_bytes in gpus))
    if find_devices(os.environ):
        text = "the system has some, and torch sees none; models run on the CPU"
        return Found(NOTE, text, "nvidia-smi shows the driver's CUDA: install the torch for it, of pytorch.org")
    return Found(OK, "none: models run on the CPU")


def _package(module: str, distribution: str = "") -> Check:
    name = distribution or module
    return Check(name, partial(find_package, module, name), True, f"pip install --force-reinstall {name}")


def _extra(module: str, distribution: str, extra: str, use: str) -> Check:
    fix = f"pip install 'baton-serve[{extra}]'"
    return Check(module, partial(find_extra, module, distribution, use, fix), fix=fix)


CHECKS = (
    Check("python", find_python, True),
    Check("processor", find_processor),
    Check("memory", find_memory, True, "pip install --force-reinstall psutil"),
    Check("shared memory", find_shared_memory),
    Check("open files", find_open_files),
    Check(f"port {ROUTER_PORT}", partial(find_port, ROUTER_PORT, "--port")),
    Check(f"port {CONTROL_PORT}", partial(find_port, CONTROL_PORT, "--control-port of `baton router`")),
    _package("zmq", "pyzmq"),
    _package("aiohttp"),
    _package("msgspec"),
    _package("tokenizers"),
    Check("hub", find_hub, True, "pip install --force-reinstall huggingface_hub"),
    _extra("nixl", "nixl", "nixl", "--kv-transport nixl"),
    _extra("PIL", "pillow", "images", "images in requests"),
    _package("torch"),
    Check("kernels", find_kernels),
    Check("gpu", find_gpus),
    _extra("flashinfer", "flashinfer-python", "gpu", "attention on GPUs"),
    _package("transformers"),
)
