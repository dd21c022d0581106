"""The role of a node that does any leg: a decode node, and a prefill leg over the same engine and the same sending end.

Knows of the two legs how they are made, which the program says.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from baton.engine.build import Engine
from baton.kvtransfer.commands import SendingNotice
from baton.kvtransfer.receiving_end import ReceivingEnd
from baton.kvtransfer.sending_end import SendingEnd
from baton.kvtransfer.transports.registry import NIXL, RECEIVER, source_settings
from baton.node.borrower import PrefixBorrower
from baton.node.lender import PrefixLender
from baton.node.loop import Leg
from baton.node.metrics import StepCounters
from baton.node.mixed_leg import MixedLeg, PromptLeg
from baton.node.pool import Ends
from baton.node.role import Role
from baton.node.sharing_leg import SharingLeg
from baton.wire.messages.membership import DECODE
from baton.wire.request_key import RequestKey

MakePrefill = Callable[[Engine, SendingEnd, StepCounters], PromptLeg]
MakeDecode = Callable[
    [Engine, ReceivingEnd, SendingEnd, Callable[[SendingNotice], None], Collection[RequestKey], StepCounters], Leg
]


def mixed_role(preference: str, make_prefill: MakePrefill, make_decode: MakeDecode) -> Role:
    """To the router and to other nodes it is a decode node that takes prefill legs too. See `PrefillLeg`, and
    `DecodeLeg` and its `Source`, for what the two are made from."""

    def open_leg(engine: Engine, ends: Ends) -> tuple[SharingLeg, str]:
        own, counters = ends.transports, StepCounters()
        received = ends.receive(own)
        # an agent of nixl either sends or receives: where it is asked for, this node has one of each
        end, address = ends.send(own if own.choice == NIXL else source_settings(own))
        borrower, lender = PrefixBorrower(engine.core, received), PrefixLender(engine.core, end)
        prefill = make_prefill(engine, lender.rest, counters)
        decode = make_decode(engine, borrower.rest, lender.rest, prefill.take_notice, prefill.keys, counters)
        return SharingLeg(MixedLeg(prefill, decode), lender, borrower if ends.pulls else None), address

    return Role(DECODE, RECEIVER, open_leg, preference)
