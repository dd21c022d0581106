"""Ranks as processes: they compute together, and what ends one of them ends the engine with its reason."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch

from baton.device.host import HostDevice
from baton.engine.build import Engine, build_engine
from baton.engine.cache import load_choice, tiers
from baton.engine.models.config import load_config
from baton.engine.models.decoder import Decoder
from baton.engine.models.loading import load_weights
from baton.engine.models.ops.torch_ops import TorchOps
from baton.engine.models.shard import WHOLE, Shard
from baton.engine.runner.kv_memory import allocate_private, allocate_shared
from baton.engine.settings import OWN, EngineSettings
from baton.ranks.executor import mp, starting
from baton.ranks.executor import ranks as rank_processes
from baton.ranks.executor.choose import open_executor
from baton.ranks.executor.messages import Channel, Compute, Here, Meet, Order, Room, Share, Stop
from baton.ranks.executor.mp import MpExecutor
from baton.ranks.executor.rank_process import OrdersAhead
from baton.ranks.executor.ranks import Ranks
from baton.ranks.executor.starting import LocalRanks, RankFailed
from baton.ranks.transfer.messages import Begin as TransferBegin
from baton.ranks.transfer.messages import Listen, Listening, TransferChannel
from baton.runtime.channel import ChannelBroken
from baton.wire.prompt import Prompt
from baton.wire.sampling import DecodingParams
from tests.checkpoints import make_checkpoint
from tests.ranks.executor.thread_ranks import SharedCalls, ThreadCollectives
from tests.request_keys import key_of

END_S = 5.0
Build = Callable[..., Engine]
"""Of a folder and a number of ranks, and further settings."""


@pytest.fixture
def build() -> Iterator[Build]:
    """Engines that end with the test."""
    engines: list[Engine] = []

    def make(folder: Path, size: int, **more: Any) -> Engine:
        common = {"num_threads": 1, "num_blocks": 32, "block_size": 4, "tensor_parallel_size": size, **more}
        settings = EngineSettings(str(folder), **common)
        allocate = allocate_shared if settings.num_ranks > 1 else allocate_private
        engines.append(build_engine(settings, allocate, open_executor=open_executor))
        return engines[-1]

    yield make
    for engine in engines:
        engine.executor.close()


def answer(engine: Engine, number: int = 1, first: int = 7) -> list[int]:
    ask(engine, number, first)
    found = []
    while engine.core.has_work:
        found += [token_id for output in engine.core.step() for token_id in output.token_ids]
    return found


def ask(engine: Engine, number: int, first: int) -> None:
    prompt = Prompt.of([*range(first, first + 22)])
    engine.core.add(key_of(number), prompt, DecodingParams(temperature=0.0, max_tokens=5))


def repeat(call: Callable[[], None], for_s: float) -> None:
    begin_s = time.monotonic()
    while time.monotonic() - begin_s < for_s:
        call()
        time.sleep(0.01)


def ranks_of(engine: Engine) -> list[psutil.Process]:
    assert isinstance(engine.executor, MpExecutor)
    return [psutil.Process(pid) for pid in engine.executor.pids]


def test_processes_compute_together_and_one_that_is_killed_ends_all(
    tmp_path: Path, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in ((load_choice, "LATENCY_S"), (load_choice, "TOLERANCE_S"), (tiers, "LATENCY_S")):
        monkeypatch.setattr(module, name, 60.0)
    # quantized while they load: each of two ranks has whole groups of inputs
    folder = make_checkpoint(tmp_path / "model", "llama", changes={"hidden_size": 128})
    # each of them has a pool of its own, with a tier below it, and does for handoffs what it is told
    common = {"quantization": "int8", "rank_pools": OWN, "num_blocks": 9}
    engine, alone = build(folder, 2, kv_offloading_size=0.001, **common), build(folder, 1, **common)
    ((shard, ends),) = engine.executor.take_transfer_ends().items()
    assert (shard, engine.memory.is_divided, alone.memory.is_divided) == (Shard(1, 2), True, False)
    channel = TransferChannel(ends[0], "rank 1")
    channel.send(TransferBegin("127.0.0.1", "", "decode"), END_S)
    channel.send(Listen(("zmq",)), END_S)
    assert isinstance(channel.receive(END_S), Listening)
    for number, first in enumerate((7, 60, 7)):
        assert answer(engine, number, first) == answer(alone, number, first)
    assert engine.core.offload is not None
    assert engine.core.offload.counters.num_loaded_tokens > 0
    each_round = engine.executor.watched(lambda: None)
    each_round()
    (rank,) = ranks_of(engine)
    rank.suspend()
    ask(engine, 3, 60)
    assert (engine.core.step(), engine.core.awaits_readiness) == ([], True), "it loads, and waits for that rank"
    rank.kill()
    engine.core.abort(key_of(3))
    # nothing to compute: the next rounds of the node say it
    with pytest.raises(RankFailed, match=r"^rank 1 of 2 was killed by SIGKILL$"):
        repeat(each_round, END_S)
    # and a step does
    with pytest.raises(RankFailed, match=r"^rank 1 of 2 was killed by SIGKILL$"):
        answer(engine, 4, 80)
    engine.executor.close()
    assert not rank.is_running()
    for end in ends:
        end.close()


def test_stages_on_devices_compute_together_and_one_that_is_killed_in_a_step_ends_all(
    tmp_path: Path, build: Build
) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama")
    engine = build(folder, 1, pipeline_parallel_size=2, device="emulated", max_num_batched_tokens=8)
    assert answer(engine) == answer(build(folder, 1))
    engine.core.add(
        key_of(2), Prompt.of([*range(40, 62)]), DecodingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    )
    engine.core.step()
    assert engine.core.num_steps_in_flight == 2
    (rank,) = ranks_of(engine)
    rank.kill()

    def step() -> None:
        engine.core.step()

    begin_s = time.monotonic()
    with pytest.raises(RankFailed, match=r"^rank 1 of 2 \(stage 0 of 2\) was killed by SIGKILL$"):
        repeat(step, END_S)
    assert time.monotonic() - begin_s < END_S


class StoppedChild:
    """A rank that has come up, and then was stopped. See `Child`."""

    has_started = True

    def __init__(self, module: str, descriptor: str, pass_fds: Sequence[int]) -> None:
        self._process = subprocess.Popen(["sleep", "60"])
        self.pid = self._process.pid
        self._channel = Channel(socket.socket(fileno=os.dup(int(descriptor))), "the driver")
        if self.has_started:
            self._channel.send(Here(), 1.0)
            self._channel.send(Room(7), 1.0)
        self._process.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        self._process.kill()
        self._channel.close()

    def wait(self, timeout_s: float) -> int | None:
        return self._process.poll()  # while it is stopped it does not end

    def end(self) -> None:
        self.kill()
        self._process.wait(END_S)


def test_a_rank_that_stands_still_in_a_step_is_named_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "Child", StoppedChild)
    ranks = Ranks(EngineSettings(tensor_parallel_size=1, pipeline_parallel_size=2), 1, LocalRanks(), "")
    (pid,) = ranks.pids
    assert ranks.fewest_blocks(9, END_S) == 7
    assert ranks.fewest_blocks(5, END_S) == 5
    with ranks.within(END_S * 60):
        repeat(ranks.require_alive, 0.3)
    reason = r"^rank 1 of 2 \(stage 0 of 2\) is stopped, and a step was to take 0\.25 s at most$"
    with pytest.raises(RankFailed, match=reason), ranks.within(0.25):
        repeat(ranks.require_alive, END_S)
    ranks.close()
    assert not psutil.pid_exists(pid)


def test_a_rank_that_stands_still_while_all_measure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "Child", StoppedChild)
    monkeypatch.setattr(mp, "_MEASURE_S", 0.25)
    executor = MpExecutor(EngineSettings(pipeline_parallel_size=2), HostDevice(), 1, LocalRanks(), "")

    def measure() -> int:
        repeat(executor.leader.require_alive, END_S)
        return 9

    with pytest.raises(RankFailed, match=r"^rank 1 of 2 \(stage 0 of 2\) is stopped, and a step was to take 0\.25 s"):
        executor.fewest_blocks(measure)
    executor.close()


def test_a_process_that_hangs_in_a_call_between_gpus_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "Child", StoppedChild)
    monkeypatch.setattr(rank_processes, "LAST_RESORT_S", 0.05)
    has_ended = threading.Event()
    monkeypatch.setattr(os, "_exit", lambda status: has_ended.set())
    for calls_hang in (True, False):
        has_ended.clear()
        ranks = Ranks(EngineSettings(tensor_parallel_size=2), 1, LocalRanks(), "", calls_hang=calls_hang)
        with contextlib.suppress(RankFailed), ranks.within(0.01):
            assert has_ended.wait(END_S if calls_hang else 0.3) == calls_hang
        ranks.close()


def test_a_rank_that_stands_still_while_nothing_is_computed_is_named_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "Child", StoppedChild)
    ranks = Ranks(EngineSettings(tensor_parallel_size=2), 1, LocalRanks(), "")
    (pid,) = ranks.pids
    repeat(ranks.require_alive, 0.5)
    aborted = [threading.Event() for _ in range(2)]
    for each in aborted:
        ranks.abort_when_lost(each.set)
    monkeypatch.setattr(rank_processes, "STANDING_S", 0.1)
    with pytest.raises(RankFailed, match=r"^rank 1 of 2 is stopped, for 0\.1 s now$"):
        repeat(ranks.require_alive, END_S)
    # who waits for a device goes on without a result, and has to learn that
    assert all(each.wait(END_S) for each in aborted)
    with pytest.raises(RankFailed, match=r"^rank 1 of 2 is stopped"), ranks.within(END_S):
        pass
    ranks.close()
    assert not psutil.pid_exists(pid)


def test_a_rank_that_does_not_start_in_time_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "Child", StoppedChild)
    monkeypatch.setattr(rank_processes, "START_TIMEOUT_S", 0.5)
    monkeypatch.setattr(StoppedChild, "has_started", False)
    with pytest.raises(RankFailed, match=r"^did not start within 0\.5 s: rank 1 of 2 \(is stopped\)$"):
        Ranks(EngineSettings(tensor_parallel_size=2), 1, LocalRanks(), "")


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("tie", [False, True])
def test_each_rank_reads_and_holds_its_share(tmp_path: Path, num_ranks: int, tie: bool) -> None:
    folder = make_checkpoint(tmp_path, "llama", tie=tie, vocab_size=321, changes={"num_key_value_heads": 4})
    config = load_config(folder)
    calls = SharedCalls(num_ranks)

    def sizes(shard: Shard) -> tuple[int, int, int]:
        """Elements that are read, those that are held, and those of norms, which every rank has."""
        collectives = None if shard == WHOLE else ThreadCollectives(shard.rank, calls)
        decoder = Decoder(config, torch.float32, "cpu", TorchOps(), shard, collectives)
        parameters = list(decoder.parameters())
        load_weights(folder, decoder)
        read = sum(len(source.taken[0]) * len(source.taken[-1]) for each in parameters for source in each.sources
                   if len(source.shape) == 2)  # fmt: skip
        matrices = sum(each.tensor.numel() for each in parameters if each.tensor.dim() == 2)
        return read, matrices, sum(each.tensor.numel() for each in parameters if each.tensor.dim() == 1)

    whole = sizes(WHOLE)
    shares = [sizes(Shard(rank, num_ranks)) for rank in range(num_ranks)]
    assert sum(read for read, _, _ in shares) == sum(held for _, held, _ in shares) == whole[0] == whole[1]
    # a vocabulary of 321 is not divided equally
    assert max(held for _, held, _ in shares) <= whole[1] / num_ranks + 2 * 64
    assert {norms for _, _, norms in shares} == {whole[2]}


@pytest.mark.parametrize("tie", [False, True])
def test_each_stage_reads_its_layers_and_a_tied_head_the_table(tmp_path: Path, tie: bool) -> None:
    folder = make_checkpoint(tmp_path, "llama", tie=tie, changes={"num_hidden_layers": 3})
    config = load_config(folder)

    def names(shard: Shard) -> list[str]:
        decoder = Decoder(config, torch.float32, "cpu", TorchOps(), shard)
        found = [source.name for parameter in decoder.parameters() for source in parameter.sources]
        load_weights(folder, decoder)
        return found

    first, last = names(Shard(0, 1, 0, 2)), names(Shard(0, 1, 1, 2))
    assert sorted(first + last) == sorted(names(WHOLE) + ["model.embed_tokens.weight"] * tie)
    assert {name.split(".")[2] for name in first if ".layers." in name} == {"0", "1"}
    assert {name.split(".")[2] for name in last if ".layers." in name} == {"2"}


def test_orders_are_taken_while_the_rank_waits_for_its_device() -> None:
    untaken: list[Order] = [Compute((), b"", (), b""), Meet(), Stop()]
    is_taken = threading.Event()

    def next_order() -> Order:
        if len(untaken) == 1:
            is_taken.set()
        return untaken.pop(0)

    orders = OrdersAhead(next_order, 2)
    assert is_taken.wait(END_S)
    assert [type(orders.next()) for _ in range(3)] == [Compute, Meet, Stop]

    def broken() -> Stop:
        raise ChannelBroken("the driver is gone")

    with pytest.raises(ChannelBroken, match="the driver is gone"):
        OrdersAhead(broken, 2).next()


def test_a_message_that_is_none_is_refused() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(ours, "rank 1")
    order = Compute((Share(0, 2, b"\0\0\0\0"),), b"12345678" * 2, (b"",), b"")
    channel.send(order, 1.0)
    other = Channel(theirs, "the driver")
    assert other.receive(1.0) == order
    for body in (msgspec.msgpack.encode(["Compute", 3]), msgspec.msgpack.encode({"type": "Stop"}), b"\xc1"):
        theirs.sendall(len(body).to_bytes(4, "little") + body)
        with pytest.raises(ChannelBroken, match="rank 1 says what is no message"):
            channel.receive(1.0)
    theirs.sendall(b"\xff\xff\xff\xff")
    with pytest.raises(ChannelBroken, match="announces a message of 4294967295 bytes"):
        channel.receive(1.0)
    with pytest.raises(ChannelBroken, match=r"said nothing for 0\.01 s"):
        channel.receive(0.01)
    theirs.close()
    with pytest.raises(ChannelBroken, match="rank 1 is gone"):
        channel.receive(1.0)
    channel.close()


def test_a_descriptor_travels_with_its_message(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    (tmp_path / "file").write_bytes(b"pool")
    with (tmp_path / "file").open("rb") as file:
        Channel(ours, "rank 1").send(Stop(), 1.0, [file.fileno()])
    other = Channel(theirs, "the driver")
    assert other.receive(1.0) == Stop()
    with os.fdopen(other.take_descriptor(), "rb") as received:
        assert received.read() == b"pool"
    with pytest.raises(ChannelBroken, match="sent no descriptor"):
        other.take_descriptor()
    ours.close()
    theirs.close()
