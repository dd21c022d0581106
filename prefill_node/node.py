"""The role of a prefill node: it sends KV, and its pool is closed to the writes of peers."""

from __future__ import annotations

from baton.engine.build import Engine
from baton.kvtransfer.sending_end import SendingEnd
from baton.kvtransfer.transports.registry import SENDER
from baton.node.first_steps import FirstSteps
from baton.node.loop import Leg
from baton.node.metrics import StepCounters
from baton.node.pool import Ends
from baton.node.role import Role
from baton.prefill_node.leg import PrefillLeg
from baton.wire.messages import PREFILL


def make_prefill(engine: Engine, end: SendingEnd, counters: StepCounters | None = None) -> PrefillLeg:
    """A leg over this engine; see there."""
    return PrefillLeg(engine.core, end, engine.memory.layout.layer_ends, FirstSteps(), counters)


def _open_leg(engine: Engine, ends: Ends) -> tuple[Leg, str]:
    end, address = ends.send(ends.transports)
    return make_prefill(engine, end), address


PREFILL_ROLE = Role(PREFILL, SENDER, _open_leg)
