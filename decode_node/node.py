"""The role of a decode node: peers write into its pool, and it hands over what runs here when it leaves."""

from __future__ import annotations

from collections.abc import Callable, Collection

from baton.decode_node.leg import DecodeLeg
from baton.decode_node.source import Source, nobody
from baton.engine.build import Engine
from baton.kvtransfer.commands import SendingNotice
from baton.kvtransfer.receiving_end import ReceivingEnd
from baton.kvtransfer.sending_end import SendingEnd
from baton.kvtransfer.transports.registry import NIXL, RECEIVER, source_settings
from baton.node.borrower import PrefixBorrower
from baton.node.first_steps import FirstSteps
from baton.node.lender import PrefixLender
from baton.node.metrics import StepCounters
from baton.node.pool import Ends
from baton.node.role import Role
from baton.node.sharing_leg import SharingLeg
from baton.wire.messages.membership import DECODE
from baton.wire.request_key import RequestKey


def make_decode(
    engine: Engine,
    received: ReceivingEnd,
    end: SendingEnd,
    pass_on: Callable[[SendingNotice], None] = nobody,
    others: Collection[RequestKey] = (),
    counters: StepCounters | None = None,
) -> DecodeLeg:
    """A leg over this engine; see there, and `pass_on` at `Source`."""
    return DecodeLeg(engine.core, received, FirstSteps(), Source(engine.core, end, pass_on), others, counters)


def _open_leg(engine: Engine, ends: Ends) -> tuple[SharingLeg, str]:
    """Nodes that take KV of this one dial its address. It has none where nothing but nixl may carry KV and it lends no
    prefixes: that would take a second agent."""
    own, pulls = ends.transports, ends.pulls
    received = ends.receive(own)
    end, address = ends.send(own if own.choice == NIXL and pulls else source_settings(own))
    borrower, lender = PrefixBorrower(engine.core, received), PrefixLender(engine.core, end)
    leg = make_decode(engine, borrower.rest, lender.rest)
    return SharingLeg(leg, lender, borrower if pulls else None), "" if own.choice == NIXL and not pulls else address


DECODE_ROLE = Role(DECODE, RECEIVER, _open_leg)
