"""Helper: what lends and borrows at one node, with an engine that computes nothing and ends whose threads are tests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from baton.engine.cache.block_pool import BlockPool
from baton.engine.core import EngineCore
from baton.engine.scheduler.limits import SchedulerLimits
from baton.engine.scheduler.scheduler import Scheduler
from baton.kvtransfer.receiving_end import ReceivingEnd
from baton.kvtransfer.sending_end import SendingEnd
from baton.wire.messages.prefixes import Lend, Pull
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey

SIZE, NUM_BLOCKS = 4, 8
PROMPT = Prompt(tuple(range(16)))


class Thread:
    """A transfer thread that does nothing but note what it is asked for."""

    def __init__(self) -> None:
        self.commands: list[Any] = []

    def post(self, command: object) -> None:
        self.commands.append(command)

    def require_alive(self) -> None:
        """It lives."""


class Notices:
    """A mailbox that wakes nobody."""

    def __init__(self) -> None:
        self.wakeup = object()
        self._items: list[Any] = []

    def put(self, item: object) -> None:
        self._items.append(item)

    def take(self) -> list[Any]:
        found, self._items = self._items, []
        return found

    def close(self) -> None:
        """Nothing is open."""


def make_core() -> EngineCore:
    pool = BlockPool(NUM_BLOCKS)
    limits = SchedulerLimits(SIZE, 4, 16, NUM_BLOCKS * SIZE, 100)
    runner = cast(Any, SimpleNamespace(is_asynchronous=False))
    return EngineCore(pool, Scheduler(pool, limits, frozenset()), runner, "model")


def sending_end() -> tuple[SendingEnd, Thread, Notices]:
    thread, notices = Thread(), Notices()
    return SendingEnd(cast(Any, None), cast(Any, thread), notices), thread, notices


def receiving_end() -> tuple[ReceivingEnd, Thread, Notices]:
    thread, notices = Thread(), Notices()
    return ReceivingEnd(cast(Any, None), cast(Any, thread), notices), thread, notices


def cache(core: EngineCore, prompt: Prompt, key: RequestKey) -> None:
    """Put the whole blocks of a prompt into the prefix cache."""
    reservation = core.handoffs.reserve(key, prompt)
    assert reservation is not None
    core.handoffs.publish(reservation, prompt, range(prompt.num_tokens // SIZE))
    core.handoffs.release(key)


def lend(key: RequestKey, prompt: Prompt = PROMPT) -> Lend:
    return Lend(*key, prompt, "T", 5)


def pull(key: RequestKey, prompt: Prompt = PROMPT) -> Pull:
    return Pull(*key, prompt, "S", 6, "tcp://127.0.0.1:9")
