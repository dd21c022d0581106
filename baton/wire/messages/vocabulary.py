"""Which messages may come over a node's control connection, in each direction."""

from __future__ import annotations

from baton.wire.codec import Codec
from baton.wire.messages.legs import Cancel, Decode, HandedOver, HandOver, Prefill
from baton.wire.messages.membership import (
    Drain,
    Heartbeat,
    Hello,
    Introduce,
    Leaving,
    Ping,
    Pong,
    Refusal,
    Resume,
    Welcome,
)
from baton.wire.messages.output import Failed, PromptRead, Tokens
from baton.wire.messages.prefixes import CacheEvents, Lend, Pull, Pulled

ROUTER_TO_NODE = Codec(Welcome, Refusal, Ping, Introduce, Resume, Prefill, Decode, Cancel, HandOver, Lend, Pull, Drain)
NODE_TO_ROUTER = Codec(
    Hello, Heartbeat, Pong, Resume, Leaving, Tokens, PromptRead, Failed, HandedOver, Pulled, CacheEvents
)
