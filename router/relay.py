"""The relay of one request over its legs: choose nodes, start both legs at once, collect tokens, try again, cancel.

Owns every request in flight and its attempts. Knows token ids only; text is the business of `router/openai`, sockets of
`router/control.py`.

A request ends in exactly one way: its last delivery carries a finish reason, or an error is raised, or the caller
closes it. Whichever it is, both legs are told and the nodes' load is given back (`_end`).

When an attempt fails (a node reports it, or a node is lost) the next one carries prompt + emitted tokens, and old
tokens are fenced off by the attempt number. A handoff that failed twice is not tried a third time: the decode node
computes the prompt itself.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.cache.hashing import extend_hashes, root_hash
from program.clock import host_clock, now_us
from router.journal import Delivery, Journal
from router.nodes import Node, NodeRegistry
from router.policies.base import Policy, num_cached_blocks
from router.timings import RelayTimes
from wire.errors import (
    BatonError,
    ContextLengthExceeded,
    DeadlineExceeded,
    NoNode,
    Overloaded,
    RequestFailed,
    TransferFailed,
    remote_error,
)
from wire.messages import DECODE, PREFILL, Cancel, Decode, Failed, Prefill, PrefillPeer, Tokens
from wire.sampling import DecodingParams

_RETRYABLE = (RequestFailed, Overloaded)
_log = logging.getLogger(__name__)


class ControlSender(Protocol):
    """Sends messages to nodes."""

    def send(self, epoch: int, message: object) -> bool:
        """False when the node cannot be reached."""
        ...


@dataclass(frozen=True, slots=True)
class RelaySettings:
    """Limits of the relay."""

    local_prefill_tokens: int
    max_concurrent_requests: int
    max_attempts: int
    request_timeout_s: float


@dataclass(slots=True)
class RelayCounters:
    """What happened so far; read by metrics."""

    num_requests: int = 0
    num_finished: int = 0
    num_failed: int = 0
    num_cancelled: int = 0
    num_retries: int = 0
    num_split: int = 0
    num_local: int = 0


@dataclass(slots=True)
class _Flight:
    """One request between its start and its end."""

    handoff_id: bytes
    prompt_ids: tuple[int, ...]
    params: DecodingParams
    cache_salt: bytes
    journal: Journal
    prefill: Node | None = None
    decode: Node | None = None
    avoided: set[int] = field(default_factory=set)
    num_transfer_failures: int = 0
    due: deque[Delivery] = field(default_factory=deque)
    error: BatonError | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class Relay:
    """All requests in flight. Lives on one event loop; also the `ControlHandler` of the control link."""

    def __init__(
        self, registry: NodeRegistry, prefill_policy: Policy, decode_policy: Policy, settings: RelaySettings
    ) -> None:
        self.counters = RelayCounters()
        self._registry = registry
        self._prefill_policy = prefill_policy
        self._decode_policy = decode_policy
        self._settings = settings
        self._clock = host_clock()
        self._sender: ControlSender | None = None
        self._flights: dict[bytes, _Flight] = {}

    def attach(self, sender: ControlSender) -> None:
        """Complete the construction: the link and its handler need each other."""
        self._sender = sender

    @property
    def num_in_flight(self) -> int:
        """Requests that have not ended."""
        return len(self._flights)

    def check_size(self, num_prompt_tokens: int, max_tokens: int | None, param: str) -> None:
        """Raise `ContextLengthExceeded` when prompt and requested output can never fit, `NoNode` without nodes."""
        limit = self._registry.max_request_tokens
        if limit is None:
            raise NoNode("no node has joined yet", retry_after_s=1)
        wanted = num_prompt_tokens + (max_tokens or 1)
        if wanted > limit:
            raise ContextLengthExceeded(
                f"this model's context is {limit} tokens, but {wanted} were requested "
                f"({num_prompt_tokens} in the prompt, {max_tokens or 1} for the output)",
                param,
            )

    def check_room(self, num_requests: int) -> None:
        """Raise `Overloaded` when so many more requests would be too many."""
        if len(self._flights) + num_requests > self._settings.max_concurrent_requests:
            raise Overloaded(f"{len(self._flights)} requests are in flight already")

    async def generate(
        self, prompt_ids: Sequence[int], params: DecodingParams, cache_salt: bytes = b""
    ) -> AsyncGenerator[tuple[Delivery, Journal], None]:
        """Yield deliveries until one has a finish reason. Closing the iterator cancels the request on all nodes.

        Raises `Overloaded`, `NoNode`, `ContextLengthExceeded`, `RequestFailed` or `DeadlineExceeded`.
        """
        self.check_room(1)
        journal = Journal(times=RelayTimes(self._clock))
        flight = _Flight(secrets.token_bytes(16), tuple(prompt_ids), params, cache_salt, journal)
        self._flights[flight.handoff_id] = flight
        self.counters.num_requests += 1
        has_ended = False
        try:
            self._start_attempt(flight)
            deadline_s = time.monotonic() + self._settings.request_timeout_s
            while not has_ended:
                delivery = await self._next(flight, deadline_s)
                has_ended = bool(delivery.finish_reason)
                self.counters.num_finished += has_ended
                yield delivery, flight.journal
        except BatonError:
            self.counters.num_failed += 1
            raise
        except (asyncio.CancelledError, GeneratorExit):
            self.counters.num_cancelled += not has_ended
            raise
        finally:
            self._end(flight)

    def fail_all(self, error: BatonError) -> None:
        """End every request with `error`, after what it has been sent already."""
        for flight in self._flights.values():
            flight.error = error
            flight.changed.set()

    def on_tokens(self, tokens: Tokens) -> None:
        """See `ControlHandler`."""
        for event in tokens.events:
            flight = self._flights.get(event.handoff_id)
            if flight is None:
                # its node has not heard of the end, or was taken for lost: it must not go on for nobody
                self._require_sender().send(tokens.epoch, Cancel(event.handoff_id, event.attempt))
                continue
            if event.attempt != flight.journal.attempt:
                continue
            if flight.decode is not None and tokens.epoch == flight.decode.epoch:
                self._end_first_leg(flight)
            try:
                deliveries = flight.journal.record(event)
            except ValueError as error:
                self._attempt_failed(flight, RequestFailed(str(error)))
                continue
            if deliveries:
                flight.due.extend(deliveries)
                flight.changed.set()
            elif flight.decode is not None and tokens.epoch == flight.decode.epoch and flight.journal.has_gap:
                # a decode node sends in order and repeats token 1: what is missing was lost on the way
                self._attempt_failed(flight, RequestFailed("tokens of the decode node were lost"))

    def on_failed(self, failed: Failed, epoch: int) -> None:
        """See `ControlHandler`."""
        flight = self._flights.get(failed.handoff_id)
        if flight is None or failed.attempt != flight.journal.attempt or flight.journal.has_finished:
            return
        if not any(node is not None and node.epoch == epoch for node in (flight.prefill, flight.decode)):
            return  # a leg whose part is over: the other one goes on without it
        if failed.code == TransferFailed.code:
            flight.num_transfer_failures += 1
        else:
            flight.avoided.add(epoch)
        self._attempt_failed(flight, remote_error(failed.code, failed.message))

    def on_node_lost(self, node: Node, reason: str) -> None:
        """See `ControlHandler`."""
        for flight in list(self._flights.values()):
            is_affected = node is flight.prefill or node is flight.decode
            if is_affected and not flight.journal.has_finished:
                self._attempt_failed(flight, RequestFailed(f"{node.role} node {node.node_id} was lost: {reason}"))

    def _end_first_leg(self, flight: _Flight) -> None:
        """The decode node generates, so it has the KV: the prefill node's part is over."""
        if flight.prefill is not None:
            flight.prefill.load -= 1
            flight.prefill = None

    async def _next(self, flight: _Flight, deadline_s: float) -> Delivery:
        while not flight.due:
            if flight.error is not None:
                raise flight.error
            flight.changed.clear()
            try:
                async with asyncio.timeout(max(0.0, deadline_s - time.monotonic())):
                    await flight.changed.wait()
            except TimeoutError:
                message = f"the request took longer than {self._settings.request_timeout_s:g} s"
                raise DeadlineExceeded(message) from None
        return flight.due.popleft()

    def _attempt_failed(self, flight: _Flight, error: BatonError) -> None:
        """Try again where that can help, otherwise hand the error to the waiting caller."""
        self._cancel_legs(flight)
        can_retry = isinstance(error, _RETRYABLE) and flight.journal.attempt < self._settings.max_attempts
        try:
            if not can_retry:
                raise error
            self.counters.num_retries += 1
            flight.journal.next_attempt()
            _log.warning("attempt %d of a request: %s", flight.journal.attempt, error)
            self._start_attempt(flight)
        except BatonError as final:
            flight.error = final
            flight.changed.set()

    def _start_attempt(self, flight: _Flight) -> None:
        """Choose nodes and send both legs. Raises `NoNode`."""
        token_ids = (*flight.prompt_ids, *flight.journal.token_ids)
        hashes = self._hashes(token_ids, flight.cache_salt)
        without = frozenset(flight.avoided)
        decodes = self._registry.available(DECODE, without)
        if not decodes:
            raise NoNode("no decode node is available")
        decode = self._decode_policy.choose(decodes, hashes)
        prefill = self._prefill_node(flight, decode, hashes, without)
        self._send_legs(flight, decode, prefill, token_ids)

    def _prefill_node(
        self, flight: _Flight, decode: Node, hashes: Sequence[bytes], without: frozenset[int]
    ) -> Node | None:
        """The node for the first leg, or None when the decode node should do both."""
        candidates = self._registry.available(PREFILL, without)
        if not candidates or flight.num_transfer_failures >= 2:
            return None
        num_known = len(flight.prompt_ids) + len(flight.journal.token_ids)
        num_cached = num_cached_blocks(decode, hashes) * decode.hello.layout.block_size
        if num_known - num_cached <= self._settings.local_prefill_tokens:
            return None
        return self._prefill_policy.choose(candidates, hashes)

    def _send_legs(self, flight: _Flight, decode: Node, prefill: Node | None, token_ids: tuple[int, ...]) -> None:
        peer = None
        flight.prefill, flight.decode = prefill, decode
        flight.journal.times.legs_sent(now_us(), *(node.hello.clock for node in (prefill, decode) if node is not None))
        if prefill is not None:
            peer = PrefillPeer(prefill.node_id, prefill.epoch, prefill.hello.peer_address)
            first_leg = Prefill(
                handoff_id=flight.handoff_id,
                attempt=flight.journal.attempt,
                token_ids=token_ids,
                num_prompt_tokens=len(flight.prompt_ids),
                params=flight.params,
                cache_salt=flight.cache_salt,
                decode_node_id=decode.node_id,
                decode_epoch=decode.epoch,
            )
            self._send_leg(prefill, first_leg)
        last_leg = Decode(
            handoff_id=flight.handoff_id,
            attempt=flight.journal.attempt,
            token_ids=token_ids,
            num_prompt_tokens=len(flight.prompt_ids),
            params=flight.params,
            cache_salt=flight.cache_salt,
            prefill_peer=peer,
        )
        self._send_leg(decode, last_leg)
        self.counters.num_split += prefill is not None
        self.counters.num_local += prefill is None

    def _send_leg(self, node: Node, message: Prefill | Decode) -> None:
        node.load += 1
        # a node that cannot be reached is declared lost at once, which starts the next attempt
        self._require_sender().send(node.epoch, message)

    def _cancel_legs(self, flight: _Flight) -> None:
        cancel = Cancel(flight.handoff_id, flight.journal.attempt)
        for node in (flight.prefill, flight.decode):
            if node is not None:
                node.load -= 1
                self._require_sender().send(node.epoch, cancel)
        flight.prefill = flight.decode = None

    def _end(self, flight: _Flight) -> None:
        self._flights.pop(flight.handoff_id, None)
        self._cancel_legs(flight)

    def _hashes(self, token_ids: Sequence[int], cache_salt: bytes) -> list[bytes]:
        node = next(iter(self._registry.all()), None)
        hashes: list[bytes] = []
        if node is not None:
            root = root_hash(node.hello.fingerprint, cache_salt)
            extend_hashes(hashes, token_ids, node.hello.layout.block_size, root)
        return hashes

    def _require_sender(self) -> ControlSender:
        if self._sender is None:
            raise RuntimeError("a relay needs its control link")
        return self._sender
