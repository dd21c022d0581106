"""Pieces and copies of the "nccl" transport, and what its groups ask of NCCL, as far as it shows without a GPU."""

from __future__ import annotations

import os
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from baton.kvtransfer.transports.nccl import blocks, group
from baton.kvtransfer.transports.nccl.blocks import gather, gather_indexed, scatter, scatter_indexed
from baton.kvtransfer.transports.nccl.group import PairStore, backend_of, finish
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
