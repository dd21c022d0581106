"""The role of a prefill node: it sends KV, and its pool is closed to the writes of peers.

What it takes of other nodes, prefixes that they have cached, it writes into its pool itself: by transports that hand it
the bytes. With nixl its pool is open to peers, unless it is told to take no prefixes.
"""

from __future__ import annotations

import logging

from baton.engine.build import Engine
from baton.kvtransfer.sending_end import SendingEnd
from baton.kvtransfer.transports.registry import SENDER, pulling_settings
from baton.node.borrower import PrefixBorrower
from baton.node.first_steps import FirstSteps
from baton.node.lender import PrefixLender
from baton.node.metrics import StepCounters
from baton.node.pool import Ends
from baton.node.role import Role
from baton.node.sharing_leg import SharingLeg
from baton.prefill_node.leg import PrefillLeg
from baton.wire.messages.membership import PREFILL

_log = logging.getLogger(__name__)


def make_prefill(engine: Engine, end: SendingEnd, counters: StepCounters | None = None) -> PrefillLeg:
    """A leg over this engine; see there."""
    return PrefillLeg(engine.core, end, engine.memory.layout.layer_ends, FirstSteps(), counters)


def _open_leg(engine: Engine, ends: Ends) -> tuple[SharingLeg, str]:
    """Its first port is the one at which decode nodes dial it, whatever else it listens at."""
    end, address = ends.send(ends.transports)
    lender, by = PrefixLender(engine.core, end), pulling_settings(ends.transports)
    if by is None or engine.memory.is_divided or not ends.pulls:
        if ends.pulls:
            _log.info("no prefixes are pulled here: not by %s, nor into pools of ranks", ends.transports.choice)
        return SharingLeg(make_prefill(engine, lender.rest), lender, None), address
    borrower = PrefixBorrower(engine.core, ends.receive(by))
    return SharingLeg(make_prefill(engine, lender.rest), lender, borrower), address


PREFILL_ROLE = Role(PREFILL, SENDER, _open_leg)
