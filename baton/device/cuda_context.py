"""What libraries beside torch (UCX, NCCL, kernels) need of CUDA: a thread's context, facts about memory and GPUs.

Knows no libraries and no pools, only a device's number. Imported for pools in the memory of a GPU, and by who asks
which GPUs there are.
"""

from __future__ import annotations

import torch


def bind_context(device_index: int) -> None:
    """Make this device the current one of the calling thread, and its context current too.

    UCX looks for the context that is current. CUDA binds a thread to one at its first call that needs a device, and
    choosing a device is not always such a call.
    """
    torch.cuda.set_device(device_index)
    torch.cuda.current_stream(device_index).synchronize()


def is_in_one_allocation(address: int, device_index: int) -> bool:
    """Whether torch has this memory from cudaMalloc, in one piece. CUDA IPC hands nothing else to another process:
    neither `expandable_segments` nor a memory pool of CUDA."""
    if torch.cuda.get_allocator_backend() != "native":
        return False
    for segment in torch.cuda.memory_snapshot():  # type: ignore[no-untyped-call]
        begin, end = segment["address"], segment["address"] + segment["total_size"]
        if segment["device"] == device_index and begin <= address < end:
            return not segment.get("is_expandable", False)
    return True


def synchronize(device_index: int) -> None:
    """Wait for all work that this process has issued on the device, on any stream."""
    torch.cuda.synchronize(device_index)


def gpu_identity(device: torch.device) -> str:
    """The globally unique name of a GPU."""
    return str(torch.cuda.get_device_properties(device).uuid)


def compute_facts(device: torch.device) -> tuple[tuple[int, int], int]:
    """(compute capability, number of multiprocessors) of a GPU."""
    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.minor), properties.multi_processor_count


def visible_gpus() -> list[tuple[str, int]]:
    """Name and bytes of memory of each GPU that torch sees; [] where it sees none."""
    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [(properties.name, properties.total_memory) for properties in found]
