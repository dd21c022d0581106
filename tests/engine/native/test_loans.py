from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from baton.engine.native.arguments import DTYPES, BatonLinear, BatonPack
from baton.engine.native.library import Kernels, open_kernels
from baton.engine.native.loans import CoreLoans, Lending, open_page
from baton.wire.errors import InvalidSetting
from tests.engine.native import compiled
from tests.engine.native.compiled import LEVELS, needs_kernels

CORE = min(os.sched_getaffinity(0))
DEADLINE_S = 30.0
HARDLY_ANY_S = 0.005
"""What a guest needs to see now and then that it may not compute."""
FLOAT32 = DTYPES[torch.float32]
TOKENS, MANY_TOKENS, IN, OUT = 64, 8192, 512, 1024


class Nodes:
    """The pool of one node, with a guest on a core of another, the owner."""

    def __init__(self, page: int) -> None:
        self.owner = CoreLoans(compiled.library(), Lending(page, 1, (0,), ()))
        before = threads()
        self.loans = CoreLoans(compiled.library(), Lending(page, 0, (), ((CORE, 1),)))
        self.kernels = Kernels(compiled.library(), 1, LEVELS[0], self.loans)
        (self._guest,) = threads() - before
        self._x = torch.randn(MANY_TOKENS, IN, generator=torch.Generator().manual_seed(1))
        weight = torch.randn(OUT, IN, generator=torch.Generator().manual_seed(2))
        self._packed = torch.zeros(self.kernels.packed_bytes(torch.float32, OUT, IN) + 64, dtype=torch.uint8)
        self._weights = self._packed[-self._packed.data_ptr() % 64 :].data_ptr()
        self.kernels.pack(BatonPack(self._weights, weight.data_ptr(), OUT, IN, IN, FLOAT32))

    def compute(self, num_tokens: int = TOKENS) -> torch.Tensor:
        out = torch.full((num_tokens, OUT), torch.nan)
        addresses = out.data_ptr(), self._x.data_ptr(), self._weights, None
        self.kernels.linear(BatonLinear(*addresses, num_tokens, OUT, IN, OUT, IN, FLOAT32, 1))
        return out

    def compute_for(self, seconds: float) -> float:
        """Compute for so long, of the time of this thread; how much of its own the guest took for it."""
        before, ends_s = self.guest_s, time.thread_time() + seconds
        while time.thread_time() < ends_s:
            self.compute()
        return self.guest_s - before

    @property
    def guest_s(self) -> float:
        return int(Path(f"/proc/self/task/{self._guest}/schedstat").read_text().split()[0]) / 1e9


def threads() -> set[str]:
    return {task.name for task in Path("/proc/self/task").iterdir()}


def wait_for_help(nodes: Nodes) -> None:
    """On a busy machine guests stay away for most of the time."""
    deadline_s, helped_s = time.monotonic() + DEADLINE_S, nodes.guest_s + 2 * HARDLY_ANY_S
    while nodes.guest_s < helped_s:
        nodes.compute()
        assert time.monotonic() < deadline_s, "the guest did not compute"


@pytest.fixture
def page() -> Iterator[int]:
    descriptor = open_page()
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def nodes(page: int) -> Iterator[Nodes]:
    nodes = Nodes(page)
    yield nodes
    nodes.kernels.close()


@needs_kernels
def test_a_guest_computes_while_the_core_is_lent_and_not_otherwise(nodes: Nodes) -> None:
    assert nodes.compute_for(0.05) < HARDLY_ANY_S
    nodes.owner.give()
    wait_for_help(nodes)
    nodes.owner.take_back()
    nodes.compute()  # the tile that it has in its hands
    assert nodes.compute_for(0.05) < HARDLY_ANY_S


@needs_kernels
def test_a_guest_leaves_in_the_middle_of_an_operation(nodes: Nodes) -> None:
    nodes.owner.give()
    before_s = nodes.guest_s
    long = threading.Thread(target=nodes.compute, args=(MANY_TOKENS,))
    long.start()
    while nodes.guest_s < before_s + 0.001 and long.is_alive():
        pass
    nodes.owner.take_back()
    taken_back_s = nodes.guest_s
    long.join(DEADLINE_S)
    assert nodes.guest_s < taken_back_s + HARDLY_ANY_S


@needs_kernels
def test_a_loan_with_an_end_is_over_without_its_owner(nodes: Nodes) -> None:
    nodes.owner.give(3600.0)
    wait_for_help(nodes)
    nodes.owner.give(0.0)
    nodes.compute()
    assert nodes.compute_for(0.05) < HARDLY_ANY_S


@needs_kernels
def test_results_are_the_same_bits_whoever_computes_them(nodes: Nodes) -> None:
    alone, ends = nodes.compute(), threading.Event()

    def come_and_go() -> None:
        while not ends.is_set():
            nodes.owner.give()
            ends.wait(0.0005)
            nodes.owner.take_back()

    owner = threading.Thread(target=come_and_go)
    owner.start()
    try:
        for _ in range(200):
            assert torch.equal(nodes.compute(), alone)
    finally:
        ends.set()
        owner.join()


@needs_kernels
def test_a_node_that_computes_wants_cores_until_it_lends_its_own_or_is_silent(nodes: Nodes) -> None:
    nodes.loans.give()
    assert not nodes.owner.is_wanted(3600.0)
    nodes.loans.take_back()
    assert nodes.owner.is_wanted(3600.0)
    assert not nodes.owner.is_wanted(0.0)
    assert not nodes.loans.is_wanted(3600.0)  # rests for nobody


@needs_kernels
def test_a_guest_whose_core_is_taken_by_other_programs_stays_away(nodes: Nodes) -> None:
    ends, data = threading.Event(), bytes(1 << 22)

    def take_the_core() -> None:
        os.sched_setaffinity(0, {CORE})  # this thread's
        while not ends.is_set():
            hashlib.sha256(data)

    others = [threading.Thread(target=take_the_core) for _ in range(4)]
    for other in others:
        other.start()
    try:
        nodes.loans.take_back()  # it computes
        nodes.owner.give()
        deadline_s = time.monotonic() + DEADLINE_S
        while nodes.owner.is_wanted(3600.0):
            nodes.compute()
            assert time.monotonic() < deadline_s
    finally:
        ends.set()
        for other in others:
            other.join()


@needs_kernels
def test_a_node_that_starts_takes_back_what_the_one_before_it_has_lent(nodes: Nodes, page: int) -> None:
    nodes.owner.give()
    CoreLoans(compiled.library(), Lending(page, 1, (), ()))
    assert nodes.compute_for(0.05) < HARDLY_ANY_S


@needs_kernels
def test_a_core_that_is_not_there_leaves_the_pool_without_a_guest(page: int) -> None:
    before = threads()
    loans = CoreLoans(compiled.library(), Lending(page, 0, (), ((100_000, 1),)))
    Kernels(compiled.library(), 1, LEVELS[0], loans).close()
    assert threads() == before


@needs_kernels
def test_without_its_page_a_node_computes_alone(page: int, caplog: pytest.LogCaptureFixture) -> None:
    os.ftruncate(page, 64)
    kernels = open_kernels("auto", 1, compiled.library, Lending(page, 0, (), ()))
    assert kernels is not None
    assert kernels.loans is None
    assert "cores are not lent" in caplog.text
    closed = open_kernels("auto", 1, compiled.library, Lending(1_000_000, 0, (), ()))
    assert closed is not None
    assert closed.loans is None


@pytest.mark.parametrize("lending", [Lending(7, 0, (), ()), Lending(7, 1, (0, 2), ((3, 0), (4, 0), (5, 2)))])
def test_what_a_node_is_told_survives_its_flag(lending: Lending) -> None:
    assert Lending.parse(str(lending)) == lending


@pytest.mark.parametrize("text", ["7", "7:0:1", "7:0:1:2", "7:0::1@256", "7:256::", "a:0::", "7:0::1@2@3"])
def test_what_no_launcher_says_is_refused(text: str) -> None:
    with pytest.raises(InvalidSetting, match="--core-loans"):
        Lending.parse(text)
