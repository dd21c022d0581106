"""The processes of all ranks but the first, as the driver of an engine sees them.

Owns the channels to them, and the knowledge that one has ended and why. Does not know what they compute.

A rank is alive until its channel closes. One thread reads all channels: what a rank says before it ends, or the signal
that ended it, is why all of them have failed, and the end of the others. The driver finds that out in one of two ways:
a call among the ranks fails, since their connections close with the process; or, when there is nothing to compute, it
asks. A node that does neither within `LAST_RESORT_S` is ended by the thread: it hangs in a call that nobody will
answer. Between GPUs calls fail only when they are aborted (`abort_when_lost`); where that does not help, any process is
ended, also while it starts.

A rank that stands still says nothing. So the driver says for how long it may be in a call with the ranks (`within`),
and the thread ends all of them when that is over. There may never be a next call: where ranks have pools of their own,
one that is stopped receives no KV, and nothing is computed without. So the thread also ends all of them when one has
been known for `STANDING_S` to stand still.

Who starts the processes, here or on other machines, is `starting`. While ranks form their groups, what one of them
posts goes to the others of its group by way of the same thread (`meeting`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import secrets
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from baton.device.base import STEP_TIMEOUT_S
from baton.engine.models.shard import Shard
from baton.engine.settings import EngineSettings
from baton.ranks.executor.meeting import MEET_TIMEOUT_S, Meeting, groups_of
from baton.ranks.executor.messages import (
    Begin,
    Came,
    Channel,
    Failed,
    Here,
    Loaded,
    Meet,
    Order,
    Posted,
    Ready,
    Report,
    Room,
    Saved,
    Stop,
)
from baton.ranks.executor.spread import Spread
from baton.ranks.executor.starting import RankFailed, RankStarter, StartedRank
from baton.runtime.channel import ChannelBroken

START_TIMEOUT_S = 120.0
"""The time a rank has for its imports."""
LOAD_TIMEOUT_S = 1800.0
LAST_RESORT_S = 3.0
STANDING_S = 10.0
_STOP_S = 5.0
_REASON_S = 2.0
_SAY_S = 5.0
_LOOK_S = 0.2
_AWAITED: dict[type[Report], str] = {
    Here: "start",
    Loaded: "load its share of the weights",
    Room: "measure its device",
    Ready: "prepare to compute",
}
_NONCE_BYTES = 16
_log = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class _Rank:
    """`standing_s`: for how long it has been known to stand still, as the thread has counted."""

    number: int
    name: str
    shard: Shard
    process: StartedRank
    channel: Channel
    standing_s: float = 0.0


@dataclasses.dataclass(slots=True)
class _Call:
    """A call of the driver with the ranks. `waited_s`: as the thread has counted, without pauses of the process."""

    limit_s: float
    waited_s: float = 0.0


class Ranks:
    """All ranks of `settings` but number 0, as `starter` starts them. `fingerprint`: of the checkpoint, which those on
    other machines compare with theirs. `on_devices`: see `Spread`; `calls_hang`: a call of the driver with a rank that
    is gone may hang for ever, as between GPUs. Raises `RankFailed` when one does not start."""

    def __init__(
        self,
        settings: EngineSettings,
        num_threads: int,
        starter: RankStarter,
        fingerprint: str,
        *,
        on_devices: bool = False,
        calls_hang: bool = False,
    ) -> None:
        self.nonce = secrets.token_bytes(_NONCE_BYTES)
        self._ranks = [_rank(number, process, settings) for number, process in enumerate(starter.start(settings), 1)]
        own = Shard.of_process(0, settings.tensor_parallel_size, settings.pipeline_parallel_size)
        self.spread = Spread(
            [starter.here, *(rank.process.machine for rank in self._ranks)],
            [own, *(rank.shard for rank in self._ranks)],
            on_devices,
        )
        self._reported: dict[type[Report], dict[int, Report]] = {kind: {} for kind in _AWAITED}
        self._posted: dict[tuple[str, str], bytes] = {}
        self._failure = ""
        self._closing = threading.Event()
        self._ends_process, self._calls_hang = False, calls_hang
        self._aborts: list[Callable[[], None]] = []
        self._of_tiers: Callable[[int, Came | Saved], None] = _nobody
        self._call: _Call | None = None
        self._news = threading.Condition()
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        try:
            self._watcher.start()
            for rank in self._ranks:
                self._send(rank, Channel.encode(self._begin(rank, settings, num_threads, fingerprint)))
            self.await_all(Here, START_TIMEOUT_S)
            self._tell(self._ranks, Meet())
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """The process ids, in the order of ranks."""
        return [rank.process.pid for rank in self._ranks]

    def meeting(self, group: str) -> Meeting:
        """The store of a group that the driver is in. Raises `RankFailed` when the others are not there in time."""
        return Meeting(group, self._forward, self._await_posted)

    def await_all(self, kind: type[Report], timeout_s: float) -> None:
        """Wait until every rank has reported a message of this kind. Raises `RankFailed` as soon as one has ended, and
        at the deadline."""
        with self._news:
            self._news.wait_for(lambda: self._failure or len(self._reported[kind]) == len(self._ranks), timeout_s)
            self.require_alive()
            missing = [rank for rank in self._ranks if rank.number not in self._reported[kind]]
        if missing:
            names = [f"{rank.name} ({how})" if (how := rank.process.standing) else rank.name for rank in missing]
            raise RankFailed(f"did not {_AWAITED[kind]} within {timeout_s:g} s: {', '.join(names)}")

    def fewest_blocks(self, num_blocks: int, timeout_s: float) -> int:
        """The least of `num_blocks` and what every other rank has reported. Raises as `await_all`."""
        self.await_all(Room, timeout_s)
        rooms = self._reported[Room].values()
        return min(num_blocks, *(room.num_blocks for room in rooms if isinstance(room, Room)))

    def tell_ahead(self, order: Order) -> None:
        """Send an order to all ranks of the stages before the last one. Raises `RankFailed`."""
        self._tell([rank for rank in self._ranks if not rank.shard.is_last_stage], order)

    def tell(self, order: Order) -> None:
        """Send an order to all other ranks of the last stage. Raises `RankFailed`."""
        self._tell([rank for rank in self._ranks if rank.shard.is_last_stage], order)

    def tell_all(self, order: Order) -> None:
        """Send an order to all other ranks. Raises `RankFailed`."""
        self._tell(self._ranks, order)

    def hear(self, of_tiers: Callable[[int, Came | Saved], None]) -> None:
        """Have `of_tiers` called, by the thread, with what a rank reports of its tiers, and with its number."""
        self._of_tiers = of_tiers

    def hand_out(self, order: Order, descriptors_of: Callable[[Shard, StartedRank], Sequence[int]]) -> None:
        """Send an order to every rank, with the descriptors for its shard. Raises `RankFailed`."""
        for rank in self._ranks:
            self._send(rank, Channel.encode(order), descriptors_of(rank.shard, rank.process))

    @contextlib.contextmanager
    def within(self, limit_s: float) -> Iterator[None]:
        """A context for calls with the ranks. Past `limit_s` seconds they are all ended. Raises `RankFailed` at its end
        when one has ended."""
        self._call = _Call(limit_s)
        try:
            yield
        finally:
            self._call = None
        self.require_alive()  # what was aborted has no result

    def require_alive(self) -> None:
        """Raise `RankFailed` when a rank has ended."""
        if self._failure:
            raise RankFailed(self._failure)

    def abort_when_lost(self, abort: Callable[[], None]) -> None:
        """Have `abort` called, on a thread of its own, when a rank has ended: it ends what waits for that rank."""
        self._aborts.append(abort)

    def end_process_when_lost(self) -> None:
        """End this process, should it not notice within `LAST_RESORT_S` that a rank has ended."""
        self._ends_process = True

    def reason_of(self, error: Exception) -> RankFailed:
        """The error that ended the ranks, after a call with them has failed; from `error`, when all of them seem to
        live."""
        with self._news:
            self._news.wait_for(lambda: self._failure, _REASON_S)
        return RankFailed(self._failure or f"the ranks of this node cannot go on: {error}")

    def close(self) -> None:
        """End all ranks."""
        self._closing.set()
        for rank in self._ranks:
            with contextlib.suppress(ChannelBroken):  # it has ended
                rank.channel.send(Stop(), _STOP_S)
        deadline_s = time.monotonic() + _STOP_S
        for rank in self._ranks:
            rank.process.wait(max(0.0, deadline_s - time.monotonic()))
            rank.process.end()
        if self._watcher.is_alive():
            self._watcher.join(_STOP_S)
        for rank in self._ranks:
            rank.channel.close()

    def _tell(self, ranks: Sequence[_Rank], order: Order) -> None:
        frame = Channel.encode(order) if ranks else b""
        for rank in ranks:
            self._send(rank, frame)

    def _send(self, rank: _Rank, frame: bytes, descriptors: Sequence[int] = ()) -> None:
        try:
            rank.channel.send_encoded(frame, STEP_TIMEOUT_S, descriptors)
        except ChannelBroken as error:
            raise self.reason_of(error) from None

    def _begin(self, rank: _Rank, settings: EngineSettings, num_threads: int, fingerprint: str) -> Begin:
        machine, number = rank.process.machine, rank.number
        plain = {field.name: getattr(settings, field.name) for field in dataclasses.fields(EngineSettings)}
        if machine.model is not None:
            trusts = settings.trust_remote_code and machine.trusts_remote_code
            plain |= {"model": machine.model, "trust_remote_code": trusts}
        return Begin(
            number,
            plain,
            self.nonce,
            machine.num_threads or num_threads,
            self.spread.stage_host(number),
            machine.host,
            self.spread.is_before_afar(number),
            self.spread.is_next_afar(number),
            "" if machine.model is None else fingerprint,
        )

    def _forward(self, posted: Posted, poster: int = 0) -> None:
        """Tell what one rank posts to the others of its group."""
        frame = Channel.encode(posted)
        for rank in self._ranks:
            if rank.number != poster and posted.group in groups_of(rank.shard):
                with contextlib.suppress(ChannelBroken):  # its end is noticed where it is read
                    rank.channel.send_encoded(frame, _SAY_S)

    def _await_posted(self, group: str, key: str) -> bytes:
        with self._news:
            self._news.wait_for(lambda: self._failure or (group, key) in self._posted, MEET_TIMEOUT_S)
            self.require_alive()
            if (group, key) not in self._posted:
                raise RankFailed(f"the ranks of {group} did not meet within {MEET_TIMEOUT_S:g} s")
            return self._posted[group, key]

    def _watch(self) -> None:
        reasons = self._read_all()
        if self._closing.is_set():
            return
        with self._news:
            # that of the rank which others have lost, not theirs
            _, self._failure = min(reasons)
            self._news.notify_all()
        for rank in self._ranks:
            rank.process.kill()
        for abort in self._aborts:  # any of them may hang, too
            threading.Thread(target=abort, name="abort", daemon=True).start()
        call = self._call
        is_over = self._closing.wait(LAST_RESORT_S)
        hangs = self._calls_hang and call is not None and call is self._call
        if not is_over and (self._ends_process or hangs):
            _log.error("%s, and the driver hangs in a call with the ranks: this process ends", self._failure)
            os._exit(1)

    def _read_all(self) -> list[tuple[bool, str]]:
        """Read what ranks report until one ends, or stands still, and a little more from those that it brings down with
        it: (only because of another, reason) of each."""
        by_descriptor = {rank.channel.fileno(): rank for rank in self._ranks}
        reasons: list[tuple[bool, str]] = []
        looked_s = time.monotonic()
        while by_descriptor and not self._closing.is_set():
            readable, _, _ = select.select(list(by_descriptor), [], [], _LOOK_S)
            if reasons and not readable:
                break
            pause_s, looked_s = time.monotonic() - looked_s, time.monotonic()
            if not reasons and (standing := self._standing(min(pause_s, 2 * _LOOK_S))):
                reasons.append((False, standing))
            for descriptor in readable:
                if reason := self._read(by_descriptor[descriptor]):
                    reasons.append(reason)
                    del by_descriptor[descriptor]
        return reasons

    def _standing(self, passed_s: float) -> str:
        """Count `passed_s` to who stands still, and to the call that the driver is in. Who does so for too long, and
        how, as far as anybody tells; or nothing."""
        found = {rank.name: rank.process.standing for rank in self._ranks}
        for rank in self._ranks:
            rank.standing_s = rank.standing_s + passed_s if found[rank.name] else 0.0
        who = " and ".join(f"{name} {how}" for name, how in found.items() if how) or "one of the ranks stands still"
        call = self._call
        if call is not None:
            call.waited_s += passed_s
            if call.waited_s > call.limit_s:
                return f"{who}, and a step was to take {call.limit_s:.3g} s at most"
        return f"{who}, for {STANDING_S:g} s now" if any(rank.standing_s > STANDING_S for rank in self._ranks) else ""

    def _read(self, rank: _Rank) -> tuple[bool, str] | None:
        """Take a report; why the rank has ended, if it has."""
        who = rank.name
        try:
            report = rank.channel.receive(_REASON_S)
        except ChannelBroken as error:
            how = rank.process.wait(_REASON_S)
            return False, f"{who} {how}" if how else str(error)
        if isinstance(report, Failed):
            return not report.is_own, f"{who}: {report.reason}"
        if isinstance(report, Posted) and report.group in groups_of(rank.shard):
            self._forward(report, rank.number)
            with self._news:
                self._posted[report.group, report.key] = report.value
                self._news.notify_all()
            return None
        if isinstance(report, Came | Saved):
            self._of_tiers(rank.number, report)
            return None
        if not isinstance(report, Here | Loaded | Room | Ready):
            return False, f"{who} said {type(report).__name__}, which only a driver says"
        with self._news:
            self._reported[type(report)][rank.number] = report
            self._news.notify_all()
        return None


def _nobody(number: int, report: Came | Saved) -> None:
    """Nothing is saved or loaded."""


def _rank(number: int, process: StartedRank, settings: EngineSettings) -> _Rank:
    shard = Shard.of_process(number, settings.tensor_parallel_size, settings.pipeline_parallel_size)
    name = f"rank {number} of {settings.num_ranks}"
    if shard.num_stages > 1:
        name += f" (stage {shard.stage} of {shard.num_stages})"
    if process.machine.number:
        name += f" on {process.machine.host}"
    return _Rank(number, name, shard, process, Channel(process.end_of_orders, name))
