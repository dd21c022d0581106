"""Pieces and copies of the "nccl" transport, and what its groups ask of NCCL, as far as it shows without a GPU."""

from __future__ import annotations

import os
import random
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from baton.kvtransfer.transports.nccl import blocks, group
from baton.kvtransfer.transports.nccl.blocks import gather, gather_indexed, scatter, scatter_indexed
from baton.kvtransfer.transports.nccl.group import RECEIVER_RANK, SENDER_RANK, PairStore, backend_of, finish, give_up
from baton.wire.errors import TransferFailed

_CUDA = torch.device("cuda", 0)


def noise(num_blocks: int, block_bytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (num_blocks, block_bytes), dtype=torch.uint8, generator=torch.manual_seed(3))


@pytest.mark.parametrize("block_bytes", [64, 60], ids=["whole words", "odd"])
def test_both_ways_to_copy_blocks_do_the_same(block_bytes: int) -> None:
    pool, order = noise(40, block_bytes), random.Random(5).sample(range(40), 9)
    for take in (gather, gather_indexed):
        slot = torch.zeros(16, block_bytes, dtype=torch.uint8)
        take(slot, pool, order)
        assert torch.equal(slot[:9], pool[order])
        assert not slot[9:].any()
    for put in (scatter, scatter_indexed):
        target = torch.zeros_like(pool)
        put(target, order, pool[:16].clone())
        expected = torch.zeros_like(pool)
        expected[order] = pool[:9]
        assert torch.equal(target, expected)


def test_messages_are_larger_on_a_gpu() -> None:
    pools = [SimpleNamespace(device=torch.device(name), shape=(100, 2**20)) for name in ("cpu", "cuda")]
    assert [blocks.max_piece_blocks(pool) for pool in pools] == [4, 16]  # type: ignore[arg-type]
    assert [blocks.piece_bytes(pool.device) for pool in pools] == [2**22, 2**24]


def silent_store() -> PairStore:
    def hear(timeout_s: float) -> tuple[str, bytes]:
        raise TimeoutError

    return PairStore(lambda key, value: None, hear, 1.0)


def test_torchs_native_side_finds_the_rest_of_the_store() -> None:
    store = silent_store()
    native = PrefixStore("pair", store)  # calls `store` the way a backend does
    native.set("id", "value")
    assert native.get("id") == b"value"
    assert native.num_keys() == 1
    assert not native.delete_key("id")
    with pytest.raises(TransferFailed, match="does not do"):
        native.add("counter", 1)


def paired_stores(told: dict[str, bytes]) -> PairStore:
    """A store whose peer sets these."""
    entries = iter(told.items())
    return PairStore(lambda key, value: None, lambda timeout_s: next(entries), 1.0)


@pytest.mark.parametrize("peer", ["GPU-a", "GPU-b"])
def test_one_gpu_for_both_sides_is_named_before_nccl_is_asked(peer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Formed(Exception):
        pass

    def form(*arguments: Any) -> None:
        raise Formed

    monkeypatch.setattr(group, "gpu_identity", lambda device: "GPU-a")
    monkeypatch.setattr(group, "backend_of", lambda device: "nccl")
    options = SimpleNamespace()
    nccl: Any = form
    nccl.Options = lambda: options
    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
    store = paired_stores({"gpu/0": peer.encode()})
    expected, match = (TransferFailed, "both nodes are on GPU") if peer == "GPU-a" else (Formed, None)
    with pytest.raises(expected, match=match):
        group.form_group(store, 1, "127.0.0.1", _CUDA)


def test_nccl_must_not_end_the_node_for_what_a_peer_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert backend_of(_CUDA) == "nccl"
    assert os.environ == {"TORCH_NCCL_BLOCKING_WAIT": "1"}
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "0"  # the user knows better
    assert backend_of(_CUDA) == "nccl"
    assert os.environ == {"TORCH_NCCL_BLOCKING_WAIT": "0"}


class FailedWork:
    """A NCCL operation that failed: completed, and its failure shows where it is waited for with a limit."""

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: Any = None) -> bool:
        if timeout:
            raise RuntimeError("the peer is gone")
        return True


def test_an_operation_of_nccl_that_failed_is_not_taken_for_one_that_is_over() -> None:
    with pytest.raises(RuntimeError, match="the peer is gone"):
        finish(FailedWork(), 1.0, _CUDA)


class Moving:
    """A NCCL operation that is over after so many looks."""

    def __init__(self, num_looks: int) -> None:
        self.num_looks, self.waits = num_looks, list[float]()

    def is_completed(self) -> bool:
        self.num_looks -= 1
        return self.num_looks < 0

    def wait(self, timeout: Any = None) -> bool:
        self.waits.append(timeout.total_seconds())
        return True


def test_operations_are_awaited_until_their_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(
        group, "time", SimpleNamespace(monotonic=lambda: now_s[0], sleep=lambda s: now_s.append(now_s.pop() + s))
    )
    finish(over := Moving(30), 0.01, _CUDA)
    assert over.waits == [1.0]
    assert now_s[0] == pytest.approx(100.003)
    with pytest.raises(TimeoutError, match=r"nothing moved for 0\.01 s"):
        finish(Moving(10_000), 0.01, _CUDA)
    assert now_s[0] == pytest.approx(100.0131)
    finish(on_host := Moving(5), 0.25, torch.device("cpu"))
    assert (on_host.waits, on_host.num_looks) == ([0.25], 5)


def test_only_a_group_on_gpus_is_aborted() -> None:
    aborted: list[str] = []
    for name in ("cuda", "cpu"):
        give_up(SimpleNamespace(abort=lambda name=name: aborted.append(name)), torch.device(name))
    assert aborted == ["cuda"]


class Meeting:
    """A group whose peer shows this; notes what is asked of it."""

    def __init__(self, shown: bytes) -> None:
        self.asked: list[str] = []
        self.sent = b""
        self._shown = shown

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Moving:
        self.asked.append(f"send {peer} {tag}")
        self.sent = tensors[0].numpy().tobytes()
        return Moving(0)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Moving:
        self.asked.append(f"receive {peer} {tag}")
        tensors[0].copy_(torch.frombuffer(bytearray(self._shown), dtype=torch.uint8))
        return Moving(0)


@pytest.mark.parametrize("rank", [RECEIVER_RANK, SENDER_RANK])
@pytest.mark.parametrize("is_peer", [True, False])
def test_each_side_shows_what_it_was_told_and_one_of_them_sends_first(
    monkeypatch: pytest.MonkeyPatch, rank: int, is_peer: bool
) -> None:
    mine, theirs = b"m" * 16, b"t" * 16
    monkeypatch.setattr(group, "secrets", SimpleNamespace(token_bytes=lambda size: mine[:size]))
    meeting = Meeting(mine if is_peer else theirs)
    made: list[Any] = []
    monkeypatch.setattr(dist, "ProcessGroupGloo", _gloo(made, meeting), raising=False)
    told: list[tuple[str, bytes]] = []
    entries = iter([(f"nonce/{1 - rank}", theirs)])
    store = PairStore(lambda key, value: told.append((key, value)), lambda timeout_s: next(entries), 5.0)
    if is_peer:
        assert group.form_group(store, rank, "127.0.0.1", torch.device("cpu")) is meeting
    else:
        with pytest.raises(TransferFailed, match="somebody else than the peer"):
            group.form_group(store, rank, "127.0.0.1", torch.device("cpu"))
    assert told == [(f"nonce/{rank}", mine)]
    assert meeting.sent == theirs
    steps = [f"send {1 - rank} 0", f"receive {1 - rank} 0"]
    assert meeting.asked == (steps if rank == RECEIVER_RANK else steps[::-1])
    options, arguments = made
    assert arguments == (store, rank, 2, options)
    assert options._devices == [{"hostname": "127.0.0.1", "lazy_init": False}]
    assert options._timeout.total_seconds() == pytest.approx(5.0, abs=1.0)


def _gloo(made: list[Any], meeting: Meeting) -> Any:
    """The class of groups, which notes how one is made."""

    def form(*arguments: Any) -> Meeting:
        made.append(arguments)
        return meeting

    def options() -> Any:
        made.append(SimpleNamespace())
        return made[-1]

    gloo: Any = form
    gloo._Options, gloo.create_device = options, lambda **chosen: chosen
    return gloo


def test_a_store_tells_what_its_own_thread_sets_and_keeps_what_came_first() -> None:
    told: list[tuple[str, bytes]] = []
    store = PairStore(lambda key, value: told.append((key, value)), lambda timeout_s: ("k", b"theirs"), 1.0)
    store.set("k", "mine")
    thread = threading.Thread(target=store.set, args=("other", b"quiet"))
    thread.start()
    thread.join()
    store.set("k", b"again")
    assert told == [("k", b"mine"), ("k", b"again")]
    assert (store.get("k"), store.get("other"), store.num_keys()) == (b"mine", b"quiet", 2)
    assert (store.check(["k", "other"]), store.check(["k", "none"]), store.clone()) == (True, False, store)


def test_a_store_hears_its_peer_until_its_own_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, waits = [100.0], list[float]()
    monkeypatch.setattr(group, "time", SimpleNamespace(monotonic=lambda: now_s[0]))

    def hear(timeout_s: float) -> tuple[str, bytes]:
        waits.append(timeout_s)
        now_s[0] += 2.0
        return f"entry {len(waits)}", b"value"

    store = PairStore(lambda key, value: None, hear, 5.0)
    assert store.get("entry 2") == b"value"
    assert waits == [5.0, 3.0]
    with pytest.raises(TimeoutError):
        store.get("none")
    assert (waits[2:], store.remaining_s) == ([1.0], 0.001)
    assert store.num_keys() == 3


def test_a_store_of_another_thread_does_not_wait() -> None:
    store, raised = silent_store(), list[BaseException]()

    def get() -> None:
        try:
            store.get("none")
        except TimeoutError as error:
            raised.append(error)

    thread = threading.Thread(target=get)
    thread.start()
    thread.join()
    assert "did not form the group" in str(raised[0])


def test_a_peer_sets_a_bounded_number_of_entries() -> None:
    numbers = iter(range(1000))
    store = PairStore(lambda key, value: None, lambda timeout_s: (f"{next(numbers)}", b""), 5.0)
    assert store.get("63") == b""
    with pytest.raises(TransferFailed, match="more than 64 entries"):
        store.get("64")


@pytest.mark.parametrize(("block_bytes", "first_byte"), [(64, 0), (60, 0), (64, 4)])
def test_blocks_that_are_no_words_of_memory_are_copied_all_the_same(block_bytes: int, first_byte: int) -> None:
    pool, slot = (
        memory[0, first_byte : first_byte + 8 * block_bytes].view(8, block_bytes)
        for memory in (noise(1, 8 * 64 + 64), torch.zeros(1, 8 * 64 + 64, dtype=torch.uint8))
    )
    gather_indexed(slot, pool, [5, 2])
    assert torch.equal(slot[:2], pool[[5, 2]])
