"""A sender and a receiver of one transport, each in a process of its own, driven by a test.

Every wait has a deadline. A process is ended by its id, together with whatever it started.
Processes are forked by a `Starter`, which a module of tests shares, since importing torch takes longer than most tests.
A transport that works within one process has both ends in the test's own.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import lru_cache
from typing import Any, Protocol, TypeAlias

import numpy as np
import psutil

from baton.kvtransfer.transports.shm.segment import sweep_orphans
from baton.testing.transports.end_process import (
    GUARD,
    ReceiverEnd,
    SenderEnd,
    Spec,
    answer_to,
    checksums,
    open_end,
    source_bytes,
)

WAIT_S = 20.0
START_S = 60.0
_PROGRAM = "baton.testing.transports.end_process"


class EndFailed(Exception):
    """An end answered a command with an error."""


class End(Protocol):
    """One end, wherever it runs."""

    def do(self, name: str, **arguments: Any) -> Any: ...

    def freeze(self) -> None: ...

    def thaw(self) -> None: ...

    def kill(self) -> None: ...


class Starter:
    """The process that forks ends, see `end_process`. `prefix`: a command that runs it, as "ip netns exec NAME".

    A context manager. Ends are stopped before it closes.
    """

    def __init__(self, prefix: Sequence[str] = ()) -> None:
        self._requests, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [*prefix, sys.executable, "-m", _PROGRAM, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        self._requests.settimeout(START_S)
        self._is_ready = False

    def __enter__(self) -> Starter:
        return self

    def __exit__(self, *_: object) -> None:
        self._requests.close()
        try:
            self._process.wait(WAIT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(WAIT_S)

    def start(self, role: str, spec: Spec) -> ProcessEnd:
        """A new end."""
        if not self._is_ready:
            self._is_ready = self._requests.recv(16) == b"ready"
        control, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._requests, [json.dumps([role, *astuple(spec)]).encode()], [theirs.fileno()])
        return ProcessEnd(int(self._requests.recv(16)), control)


class ProcessEnd:
    """An end in a process of its own."""

    def __init__(self, pid: int, control: socket.socket) -> None:
        self._pid = pid
        self._control = control
        self._lines = control.makefile("rwb", buffering=0)
        control.settimeout(START_S)

    def do(self, name: str, **arguments: Any) -> Any:
        self._lines.write(json.dumps({"do": name, **arguments}).encode() + b"\n")
        line = bytearray()
        while not line.endswith(b"\n"):
            some = self._control.recv(2**20)
            if not some:
                raise EndFailed("the process has ended")
            line += some
        answer = json.loads(line)
        if "failure" in answer:
            raise EndFailed(answer["failure"])
        return answer["result"]

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """At once, with the processes it started; nothing of it is left when this returns."""
        processes = self._signal(signal.SIGKILL)
        self._hang_up()
        _wait_gone(processes)

    def stop(self) -> None:
        """Let it end by itself, by hanging up."""
        processes = self._processes()
        self._hang_up()
        _wait_gone(processes)

    def _hang_up(self) -> None:
        self._lines.close()
        self._control.close()

    def _processes(self) -> list[psutil.Process]:
        """Itself and what it started: a nixl agent has a session of its own."""
        try:
            process = psutil.Process(self._pid)
            return [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _signal(self, number: signal.Signals) -> list[psutil.Process]:
        processes = self._processes()
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        return processes


def _wait_gone(processes: list[psutil.Process]) -> None:
    """Wait for the end of processes; the kernel reaps them, since their starter does not."""
    _, remaining = psutil.wait_procs(processes, timeout=WAIT_S)
    for process in remaining:
        process.kill()
    assert not remaining, "it did not end by itself"


class LocalEnd:
    """An end in the test's process. It works whenever somebody asks something of it."""

    def __init__(self, end: ReceiverEnd | SenderEnd, stack: contextlib.ExitStack) -> None:
        self._end = end
        self._stack = stack
        self._is_frozen = False

    def do(self, name: str, **arguments: Any) -> Any:
        self.work()
        answer = answer_to(self._end, {"do": name, **arguments})
        self.work()
        if "failure" in answer:
            raise EndFailed(answer["failure"])
        return answer["result"]

    def work(self) -> None:
        if not self._is_frozen:
            self._end.work()

    def freeze(self) -> None:
        self._is_frozen = True

    def thaw(self) -> None:
        self._is_frozen = False

    def kill(self) -> None:
        self._stack.close()

    stop = kill


Starters: TypeAlias = tuple[Starter, Starter] | None
"""Of receivers and of senders; None: both ends are in this process."""


@dataclass(slots=True)
class Rig:
    """Both ends of one transport, connected."""

    receiver_spec: Spec
    sender_spec: Spec
    starters: Starters
    receiver: ProcessEnd | LocalEnd = field(init=False)
    sender: ProcessEnd | LocalEnd = field(init=False)
    hello: dict[str, Any] = field(init=False)
    num_handoffs: int = 0
    seed: int = 1

    def __post_init__(self) -> None:
        self.receiver = self._start("receiver")
        self.sender = self._start("sender")
        self.sender.do("fill", seed=self.seed)
        self.connect()

    def _start(self, role: str) -> ProcessEnd | LocalEnd:
        spec = self.receiver_spec if role == "receiver" else self.sender_spec
        if self.starters is not None:
            return self.starters[role == "sender"].start(role, spec)
        stack = contextlib.ExitStack()
        return LocalEnd(stack.enter_context(open_end(role, spec)), stack)

    def connect(self) -> None:
        """A new sender to the receiver that runs now, once it offers something (after a fence it may take a while)."""
        self.until(self._is_open, "an endpoint that can be opened", START_S)

    def _is_open(self) -> bool:
        self.hello = self.receiver.do("hello")
        try:
            self.open(self.hello["endpoint"])
        except EndFailed:
            return False
        return True

    def open(self, endpoint: Sequence[str]) -> None:
        """A new sender to this endpoint."""
        self.sender.do("open", endpoint=endpoint, num_target_blocks=self.receiver_spec.num_blocks)

    def restart_receiver(self) -> None:
        """Another life of it; nobody is connected."""
        self.receiver.kill()
        self.receiver = self._start("receiver")
        self.hello = self.receiver.do("hello")

    @property
    def is_silent(self) -> bool:
        return bool(self.hello["is_silent"])

    @property
    def writes_itself(self) -> bool:
        """Whether the receiver writes its own pool, so that it can refuse."""
        return not self.hello["peers_write"]

    @property
    def block_bytes(self) -> int:
        return self.receiver_spec.block_bytes

    def reset(self) -> None:
        """Both pools as at the start."""
        self.receiver.do("reset")
        self.sender.do("fill", seed=self.seed)

    def expect(self, targets: Sequence[int], *, generation: int = 3) -> int:
        """A new handoff that these blocks were granted for; its number."""
        number = self.next_number()
        self.expect_again(number, targets, generation=generation)
        return number

    def next_number(self) -> int:
        """A handoff nobody has heard of."""
        self.num_handoffs += 1
        return self.num_handoffs

    def expect_again(self, number: int, targets: Sequence[int], *, generation: int = 3) -> None:
        self.receiver.do("expect", number=number, block_ids=list(targets), generations=[generation] * len(targets))

    def push(
        self,
        number: int,
        sources: Sequence[int],
        targets: Sequence[int],
        *,
        first_index: int = 0,
        generation: int = 3,
        piece_bytes: int = 0,
    ) -> None:
        """Begin to push these blocks."""
        pairs = zip(sources, targets, strict=True)
        moves = [[first_index + i, source, target, generation] for i, (source, target) in enumerate(pairs)]
        self.sender.do("push", number=number, moves=moves, piece_bytes=piece_bytes)

    def until(self, is_done: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
        """Wait for something. Raises `TimeoutError`."""
        deadline_s = time.monotonic() + timeout_s
        while not is_done():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{what}: not within {timeout_s} s")
            time.sleep(0.002)

    def until_sent(self, number: int, timeout_s: float = WAIT_S) -> None:
        """Wait until the sender has accepted everything and reads nothing of this handoff any more."""

        def is_sent() -> bool:
            status = self.sender.do("status", number=number)
            if status["failure_seen"]:
                raise EndFailed(status["failure_seen"])
            return not status["num_left"] and not status["is_reading"]

        self.until(is_sent, "sent", timeout_s)

    def until_delivered(self, number: int, num_blocks: int, timeout_s: float = WAIT_S) -> None:
        """Wait until this many blocks of a handoff are in the receiver's pool."""
        self.until_sent(number, timeout_s)
        if not self.is_silent:
            self.until(lambda: len(self.arrived(number)) >= num_blocks, "arrived", timeout_s)
            assert sorted(self.arrived(number)) == list(range(num_blocks))

    def arrived(self, number: int) -> list[int]:
        found: list[int] = self.receiver.do("arrived", number=number)
        return found

    def settle(self) -> None:
        """Time for whatever should not happen."""
        for _ in range(10):
            self.receiver.do("hello")
            time.sleep(0.02)

    def has(self, placed: dict[int, int]) -> bool:
        """Whether the receiver's pool holds exactly this, {target: source}, and guard bytes everywhere else."""
        return not self.differences(placed)

    def differences(self, placed: dict[int, int]) -> list[int]:
        """The blocks of the receiver's pool that are not what they should be."""
        true = _true_checksums(self.seed, self.sender_spec.num_blocks, self.block_bytes)
        guard = checksums(np.full((1, self.block_bytes), GUARD, dtype=np.uint8))[0]
        found: list[int] = self.receiver.do("checksums")
        wanted = [true[placed[block_id]] if block_id in placed else guard for block_id in range(len(found))]
        return [block_id for block_id, (one, other) in enumerate(zip(found, wanted, strict=True)) if one != other]

    def close(self) -> None:
        """End both; nothing is left."""
        for end in (self.sender, self.receiver):
            end.thaw()
            end.stop()
        sweep_orphans()


@lru_cache(maxsize=4)
def _true_checksums(seed: int, num_blocks: int, block_bytes: int) -> list[int]:
    return checksums(source_bytes(seed, num_blocks, block_bytes))


@contextlib.contextmanager
def open_rig(
    receiver_spec: Spec,
    num_source_blocks: int,
    starters: Starters,
    sender_host: str = "127.0.0.1",
) -> Iterator[Rig]:
    """Both ends, ended afterwards whatever happens."""
    rig = Rig(receiver_spec, replace(receiver_spec, num_blocks=num_source_blocks, host=sender_host), starters)
    try:
        yield rig
    finally:
        rig.close()
