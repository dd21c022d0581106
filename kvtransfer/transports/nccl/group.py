"""Groups of `torch.distributed` with two members, one for each pair of nodes, without state of the whole process.

Owns how such a group is formed: the store by which both sides find each other, the address it listens on, the proof
that the other end is the peer. Knows no blocks and no ZMQ: entries of the store travel by what the caller hands in.

Invariants: nothing listens beyond `host` (torch's own `TCPStore`, which listens everywhere, is not used); every wait
has a deadline, but for one inside NCCL: a communicator whose other side dies while it is made. What a group carries is
neither encrypted nor signed.

NCCL in a node. torch gives each NCCL group a watchdog thread, which ends the *process* when an operation fails or is
late, and a peer can bring that about at any time. In blocking-wait mode there is none (nor a heartbeat monitor, which
ends the process as well), and a wait raises instead: so a node runs in that mode (`backend_of` sets
TORCH_NCCL_BLOCKING_WAIT, unless the user did). Errors are found where this side waits, with deadlines of its own.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from baton.device.cuda_context import gpu_identity
from baton.wire.errors import InvalidSetting, TransferFailed

RECEIVER_RANK, SENDER_RANK = 0, 1
_MAX_ENTRIES = 64
_NONCE_BYTES = 16
_LOOK_AGAIN_S = 1e-4
_RAISE_S = 1.0
"""How long a finished operation is given to say how it ended. Anything but 0, which would mean not to ask."""

if not dist.is_available():
    raise InvalidSetting("--kv-transport nccl: this torch has no torch.distributed; install a standard build of torch")


def backend_of(device: torch.device) -> str:
    """ "nccl" for memory of a GPU, "gloo" for memory of the host. Raises `InvalidSetting` when torch lacks it."""
    if device.type == "cuda":
        if not dist.is_nccl_available():
            raise InvalidSetting("--kv-transport nccl: this torch has no NCCL; install a CUDA build of torch for Linux")
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
        return "nccl"
    if not dist.is_gloo_available():
        raise InvalidSetting("--kv-transport nccl: this torch has no gloo; install a standard build of torch")
    return "gloo"


class PairStore(Store):
    """The store of one group: each side keeps every entry and tells the other what it sets.

    It has what gloo and NCCL need for two ranks that send and receive: set, get, check and wait (NCCL: one key, with
    the id of the communicator). The rest of torch's interface says that it is not there. `tell(key, value)` sends an
    entry to the peer; `hear(timeout_s)` returns the peer's next one or raises `TimeoutError`. Both are called by the
    thread that made the store only. Threads of a backend may use the store too, but their entries stay here. An entry
    is set once; later ones of the same key are dropped.
    """

    def __init__(
        self, tell: Callable[[str, bytes], None], hear: Callable[[float], tuple[str, bytes]], timeout_s: float
    ) -> None:
        super().__init__()
        self._tell = tell
        self._hear = hear
        self._deadline_s = time.monotonic() + timeout_s
        self._owner = threading.get_ident()
        self._entries: dict[str, bytes] = {}

    @property
    def remaining_s(self) -> float:
        """The seconds that are left until the group must stand."""
        return max(0.001, self._deadline_s - time.monotonic())

    def set(self, key: str, value: str | bytes) -> None:
        """Keep an entry, the first of its key, and tell the peer of it if this is the owner's thread."""
        entry = value.encode() if isinstance(value, str) else bytes(value)
        self._entries.setdefault(key, entry)
        if threading.get_ident() == self._owner:
            self._tell(key, entry)

    def get(self, key: str) -> bytes:
        """The entry of `key`, waited for. Raises `TimeoutError`."""
        self.wait([key])
        return self._entries[key]

    def check(self, keys: list[str]) -> bool:
        """Whether all entries are here."""
        return all(key in self._entries for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all `keys` are there. Raises `TimeoutError` at the store's own deadline, whatever `timeout`
        says."""
        while not self.check(keys):
            if threading.get_ident() != self._owner or time.monotonic() >= self._deadline_s:
                raise TimeoutError("the peer did not form the group in time")
            key, value = self._hear(self.remaining_s)
            if len(self._entries) >= _MAX_ENTRIES:
                raise TransferFailed(f"the peer set more than {_MAX_ENTRIES} entries to form a group")
            self._entries.setdefault(key, value)

    def add(self, key: str, amount: int) -> int:
        """Raise `TransferFailed`: two sides cannot count together here."""
        raise TransferFailed(f"the backend wants to count in {key!r:.64}, which the store of a pair does not do")

    def delete_key(self, key: str) -> bool:
        """False: an entry is set once, and stays."""
        return False

    def num_keys(self) -> int:
        """The number of entries that are here."""
        return len(self._entries)

    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815 the names that torch's native side calls

    def clone(self) -> PairStore:
        """The store itself: there is only one connection to share."""
        return self


def form_group(store: PairStore, rank: int, host: str, device: torch.device) -> Any:
    """The group of this side (`rank`) with its peer, for tensors on `device`; gloo listens on `host` only.

    Blocks until it stands. Raises `RuntimeError`, `TimeoutError` or `TransferFailed` when it does not in time.
    The caller keeps `store` for as long as the group: torch calls back into it.
    """
    timeout = timedelta(seconds=store.remaining_s)
    group: Any
    if backend_of(device) == "nccl":
        _require_two_gpus(store, rank, device)
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timeout
        group = nccl(store, rank, 2, options)
    else:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=host, lazy_init=False)]
        options._timeout = timeout
        options._threads = 1
        group = gloo(store, rank, 2, options)
    _recognise(store, group, rank, device)
    return group


def _require_two_gpus(store: PairStore, rank: int, device: torch.device) -> None:
    """NCCL has no two ranks on one GPU, and says so in a way that nobody understands. Raises `TransferFailed`."""
    mine = gpu_identity(device)
    store.set(f"gpu/{rank}", mine)
    if store.get(f"gpu/{1 - rank}").decode(errors="replace") == mine:
        raise TransferFailed(
            f"both nodes are on GPU {mine}, and NCCL does not connect a GPU with itself: use --kv-transport nixl or shm"
        )


def _recognise(store: PairStore, group: Any, rank: int, device: torch.device) -> None:
    """Each side shows over the group the nonce that the other told it over the store.

    Whoever only reached a port of the group does not know it. Also makes NCCL connect now, not at the first block.
    """
    peer = 1 - rank
    mine = secrets.token_bytes(_NONCE_BYTES)
    store.set(f"nonce/{rank}", mine)
    shown = torch.frombuffer(bytearray(store.get(f"nonce/{peer}")), dtype=torch.uint8).to(device)
    received = torch.zeros(_NONCE_BYTES, dtype=torch.uint8, device=device)
    steps = [lambda: group.send([shown], peer, 0), lambda: group.recv([received], peer, 0)]
    # one side sends while the other receives: NCCL would wait for ever if both sent first
    for step in steps if rank == RECEIVER_RANK else reversed(steps):
        finish(step(), store.remaining_s, device)
    if received.cpu().numpy().tobytes() != mine:
        raise TransferFailed("somebody else than the peer joined the group")


def finish(work: Any, timeout_s: float, device: torch.device) -> None:
    """Wait until a send or receive is over. Raises `RuntimeError` or `TimeoutError`; the group is of no use then."""
    if device.type != "cuda":
        # gloo: notices by itself that the peer's process is gone, and closes the group's connection at the timeout
        work.wait(timedelta(seconds=timeout_s))
        return
    deadline_s = time.monotonic() + timeout_s
    while not work.is_completed():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"nothing moved for {timeout_s:g} s")
        time.sleep(_LOOK_AGAIN_S)
    # one that has failed counts as completed: only a wait with a limit says which
    work.wait(timedelta(seconds=_RAISE_S))


def give_up(group: Any, device: torch.device) -> None:
    """End what is in flight in a group. With gloo that happens when the last reference to it goes."""
    if device.type == "cuda":
        group.abort()
