"""How many nodes of each role a deployment should have: a pure function of what was measured, and a memory of how long
it has been so.

Owns the decision and its reason. Knows neither where figures come from nor how a node is started.

A group's *pressure* is how far it is from its goal: 1 is at the goal, 2 is twice as long. For prefill nodes it is the
time that prompts wait, against the part of the TTFT goal that waiting may take; for decode nodes the time between two
tokens against its goal, or the KV that is held against what may be. Times count only where requests meet others on
their node: what one alone takes, more nodes do not change, and a machine that is busy with something else makes anybody
late. A group grows when its pressure was above 1 for a while, and shrinks when one node less would have had it below
`_ROOM` for a longer while.

Invariants: a change is by one node, of one group, between its bounds; after a change nothing is judged for a while; a
decision that is made has a reason that names what was measured and what it was compared with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.launch.cluster.file import ClusterFile, Scaling
from baton.wire.messages.membership import DECODE, PREFILL

_QUEUE_SHARE = 0.5
"""The part of the TTFT goal that prompts may wait: the rest is for computing them."""
_MEETING_SHARE = 0.1
"""Of prompts, those that have another one on their node: with fewer, the time that one in ten exceeds is not theirs."""
_KV_SHARE = 0.9
"""The part of a decode group's KV that may be held."""
_ROOM = 0.6
"""The pressure that a group may have after it lost a node."""
_BUSY_SHARE = 0.5
"""The part of the time for which the nodes of a prefill group that lost one may have something to do, and the part of
the requests that fit its steps which a decode group may have."""


@dataclass(frozen=True, slots=True)
class Load:
    """One group's share of a reading: means over the window. `num_requests`: those on its nodes. `num_busy`: its nodes
    that had any. `kv_share`: of its blocks that were held. `seqs_share`: of the requests that fit its steps."""

    num_requests: float = 0.0
    num_waiting: float = 0.0
    num_busy: float = 0.0
    kv_share: float = 0.0
    seqs_share: float = 0.0


@dataclass(frozen=True, slots=True)
class Reading:
    """Measurements of a router in the last seconds. Each time is what one request in ten exceeded; None without
    requests, or where it cannot be measured. `num_held_back`: requests that wait at the router because the nodes have
    no room."""

    window_s: float
    queue_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    num_held_back: float = 0.0
    prefill: Load = field(default_factory=Load)
    decode: Load = field(default_factory=Load)


@dataclass(frozen=True, slots=True)
class Pressure:
    """How far a group is from its goal, and what that was read from."""

    value: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Change:
    """A group should have `count` nodes."""

    role: str
    count: int
    reason: str


def prefill_pressure(reading: Reading, ttft_goal_s: float, count: int) -> Pressure:
    """The pressure on a prefill group of `count` nodes."""
    if not ttft_goal_s:
        return Pressure()
    allowed_s = _QUEUE_SHARE * ttft_goal_s
    if reading.queue_s is None and reading.ttft_s is None:
        if not reading.prefill.num_waiting:
            return Pressure()
        return Pressure(reading.window_s / allowed_s, f"prompts wait, and none was answered in {reading.window_s:g} s")
    # a prompt that is alone on its node is computed no sooner when there are more nodes
    if count and reading.prefill.num_requests * (1 - _MEETING_SHARE) <= reading.prefill.num_busy:
        return Pressure(0.0, "prompts are alone on their nodes")
    if reading.queue_s is not None:
        return Pressure(
            reading.queue_s / allowed_s, f"prompts wait {_ms(reading.queue_s)}, of {_ms(allowed_s)} that they may"
        )
    # on several machines: their clocks do not tell how much of it was waiting
    ttft_s = reading.ttft_s or 0.0
    return Pressure(ttft_s / ttft_goal_s, f"TTFT is {_ms(ttft_s)}, the goal {_ms(ttft_goal_s)}")


def decode_pressure(reading: Reading, tpot_goal_s: float, count: int, share: float = 1.0) -> Pressure:
    """The pressure on a decode group of `count` nodes, each with `share` times of what was measured."""
    if not tpot_goal_s:
        return Pressure()
    kv_share = share * reading.decode.kv_share
    found = [Pressure(kv_share / _KV_SHARE, f"{kv_share:.0%} of the KV is held, of {_KV_SHARE:.0%} that may be")]
    # a request that is alone on its node gets its tokens no faster when there are more nodes
    if reading.tpot_s is not None and reading.decode.num_requests > count:
        tpot_s = share * reading.tpot_s
        found.append(Pressure(tpot_s / tpot_goal_s, f"TPOT is {_ms(tpot_s)}, the goal {_ms(tpot_goal_s)}"))
    if reading.num_held_back:
        found.append(Pressure(2.0, f"{reading.num_held_back:.0f} requests wait for room"))
    return max(found, key=lambda pressure: pressure.value)


@dataclass(slots=True)
class Policy:
    """Decides for one deployment. All times are in seconds of one clock."""

    file: ClusterFile
    pressures: dict[str, Pressure] = field(default_factory=dict)
    """Of the last reading, by role."""
    _since_s: dict[tuple[str, int], float] = field(default_factory=dict)
    """Since when a group would grow (+1) or shrink (-1) without a break."""
    _settled_s: float = 0.0

    def decide(self, reading: Reading, counts: Mapping[str, int], now_s: float) -> Change | None:
        """The change to make now, or None. `counts`: nodes of each role."""
        self.pressures = {
            PREFILL: prefill_pressure(reading, self.file.ttft_goal_s, counts[PREFILL]),
            DECODE: decode_pressure(reading, self.file.tpot_goal_s, counts[DECODE]),
        }
        if now_s < self._settled_s:
            self._since_s.clear()
            return None
        wishes = [wish for role in (PREFILL, DECODE) if (wish := self._wish(role, reading, counts[role])) is not None]
        pending = {(wish.role, 1 if wish.count > counts[wish.role] else -1): wish for wish in wishes}
        self._since_s = {key: self._since_s.get(key, now_s) for key in pending}
        due = [key for key in pending if now_s - self._since_s[key] >= _patience_s(self.file.scaling, key[1])]
        if not due:
            return None
        # what is missed comes before what could be saved, and the worse of two first
        return pending[max(due, key=lambda key: (key[1], self.pressures[key[0]].value))]

    def settle(self, now_s: float) -> None:
        """The deployment has changed: judge nothing until what is measured is of the new one."""
        self._settled_s = now_s + self.file.scaling.settle_s
        self._since_s.clear()

    def _wish(self, role: str, reading: Reading, count: int) -> Change | None:
        group, pressure = self.file.groups[role], self.pressures[role]
        if pressure.value > 1 and count < group.maximum:
            return Change(role, count + 1, pressure.reason)
        if count > group.minimum and count > 1 and self._can_spare(role, reading, count):
            return Change(role, count - 1, f"{count - 1} would do: {pressure.reason or 'there are no requests'}")
        if count > group.minimum and count == 1 and not reading.prefill.num_requests and role == PREFILL:
            return Change(role, 0, "there are no prompts")
        return None

    def _can_spare(self, role: str, reading: Reading, count: int) -> bool:
        """Whether the same load on one node less would leave room. What takes a step is about linear in what is in
        it, so this expects rather too much."""
        share = count / (count - 1)
        if role == PREFILL:
            is_calm = share * self.pressures[PREFILL].value <= _ROOM
            return is_calm and reading.prefill.num_busy <= _BUSY_SHARE * (count - 1)
        expected = decode_pressure(reading, self.file.tpot_goal_s, count - 1, share)
        return expected.value <= _ROOM and share * reading.decode.seqs_share <= _BUSY_SHARE


def _patience_s(scaling: Scaling, direction: int) -> float:
    return scaling.up_after_s if direction > 0 else scaling.down_after_s


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"
