"""A flight is one request while it runs, with its attempts, its output and its deadline.

A flight ends in exactly one way: its last delivery carries a finish reason, or an error is handed to its reader, or its
reader closes it. When an attempt fails (a node reports it, or a node is lost) the next one carries prompt + emitted
tokens, and tokens of earlier attempts are recognised by their attempt number and dropped. When the handoff or the
prefill node has failed twice, the decode node computes the prompt itself. Whether there is a next attempt, and when it
begins, is decided in `router/requests/retries.py`.

When its decode node leaves, a flight is moved (`router/requests/moves.py`): another node
gets its KV and goes on, as the next attempt. If that fails, the one after it computes everything again.

A flight whose reader does not keep up is paused: its legs are cancelled, so that others get its place in the batch, and
the next attempt begins when the reader has taken everything. Its blocks are in the node's prefix cache meanwhile.

Choices of one prompt are a flight each. They begin together, with legs that they share; from then on nothing of one
depends on another. An attempt that fails is tried again by each of them for itself, because each continues after other
tokens; what the nodes have cached of the prompt is found there.

Knows token ids only. Tokens for the client go into the reader's `Inbox`, which several flights share when an answer has
several choices.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from baton.router.nodes.registry import Node
from baton.router.requests.attempt import Attempt, ControlSender, Legs, RelayRequest, send_legs
from baton.router.requests.figures import FlightFigures, RelayCounters
from baton.router.requests.inbox import Inbox
from baton.router.requests.moves import RequestMoves
from baton.router.requests.node_wait import NodeWait
from baton.router.requests.output import CachedTokens, Delivery, Output, ScoredPrompt
from baton.router.requests.prefix_pull import PrefixPull
from baton.router.requests.retries import Retries
from baton.router.requests.timings import RelayTimes
from baton.router.requests.trace import begin_flight
from baton.router.routing.placement import Route
from baton.router.routing.pulls import PullRecords
from baton.router.routing.selection import RouteRequest, Routing
from baton.runtime.clock import now_us
from baton.wire.errors import BatonError, DeadlineExceeded, NoNode, RequestFailed, TransferFailed, remote_error
from baton.wire.messages.legs import HandedOver
from baton.wire.messages.output import Failed, PromptRead, TokenEvent
from baton.wire.messages.prefixes import Pulled
from baton.wire.request_key import new_handoff_id, owner_of_epoch

_MAX_HANDOFF_FAILURES = 2
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FlightContext:
    """What all flights of a relay share. `clock` is the host's, see `baton.runtime.clock`."""

    routing: Routing
    sender: ControlSender
    counters: RelayCounters
    pulls: PullRecords
    max_attempts: int
    timeout_s: float
    node_wait: NodeWait
    clock: str


class Flight:
    """One request while it runs. Its deliveries go to `inbox` as those of choice `index`. Its deadline is a timer of
    the running loop."""

    def __init__(self, context: FlightContext, request: RelayRequest, inbox: Inbox, index: int) -> None:
        self.handoff_id = new_handoff_id(owner_of_epoch(context.routing.registry.epoch))
        self._context = context
        self._request = request
        self._inbox = inbox
        self._index = index
        is_scored = request.params.prompt_logprobs is not None
        scored_prompt = ScoredPrompt(request.prompt.num_tokens) if is_scored else None
        emitted_ids = list(request.emitted_ids)
        self._output = Output(prompt=scored_prompt, token_ids=emitted_ids, times=RelayTimes(context.clock))
        self.trace = begin_flight(self.handoff_id, index, request.prompt.num_tokens, self._output)
        self._cached = CachedTokens()
        self._legs: Legs | None = None
        self._avoided: set[int] = set()
        self._num_handoff_failures = 0
        self._has_failed = False
        self._is_paused = False
        self._retries = Retries(
            self.handoff_id, context.routing, context.node_wait, context.max_attempts, self._start_attempt, self.fail
        )
        self._pull = PrefixPull(self.handoff_id, context.sender, context.pulls)
        self._moves = RequestMoves(self.handoff_id, request, self._output, context.sender, context.routing)
        overdue = DeadlineExceeded(f"the request took longer than {context.timeout_s:g} s")
        self._deadline = asyncio.get_running_loop().call_later(context.timeout_s, self.fail, overdue)

    @property
    def model(self) -> str:
        """The served model that was asked for."""
        return self._request.model

    @property
    def figures(self) -> FlightFigures:
        """The measurements so far."""
        output = self._output
        # what was emitted may be cached too
        num_cached_tokens = min(output.num_cached_tokens or 0, self._request.prompt.num_tokens)
        return FlightFigures(
            num_cached_tokens,
            output.handoff,
            replace(output.times),
            output.attempt,
            dict(self._cached.by_role),
            self._cached.by_place(num_cached_tokens),
            self._pull.prefix,
        )

    @property
    def scored_prompt(self) -> ScoredPrompt | None:
        """The log probabilities of the prompt, whole from the first delivery on; None when they were not asked for."""
        return self._output.prompt

    def start(self, siblings: Sequence[Flight] = ()) -> None:
        """Begin the first attempt, and with the same legs that of `siblings`: the choices of this prompt whose numbers
        follow. When no node is available, each waits for one to join, or fails."""
        self._context.counters.num_requests += 1 + len(siblings)
        try:
            self._start_attempt(siblings)
        except NoNode:
            for flight in (self, *siblings):
                flight._retries.begin()
        except BatonError as error:
            for flight in (self, *siblings):
                flight.fail(error)

    def on_event(self, event: TokenEvent, epoch: int) -> None:
        """Take tokens that the node of that epoch has sent. A node that was given no leg of this attempt has no say."""
        output, legs = self._output, self._legs
        if legs is None or event.attempt != output.attempt or not legs.were_given_to(epoch):
            self._moves.heard(event.attempt)
            return
        is_of_decode = epoch == legs.decode_epoch
        if not is_of_decode:
            legs.has_prefilled = True
        if legs.awaits_first:
            legs.first_came(asyncio.get_running_loop().time())
        if self._cached.awaits_more:
            self._cached.note(event, is_of_decode=is_of_decode, pulled=self._pull.tokens)
        if output.prompt is not None and output.awaits_prompt:
            if not (is_of_decode and legs.prefill_runs):
                # the node that computes the prompt sends in order, so a message of the prompt was lost on its way
                self._attempt_failed(RequestFailed("log probabilities of the prompt were lost"))
                return
        elif is_of_decode and not legs.has_decoded:
            self._context.routing.ejections.succeeded(legs.prefill_epoch)
            legs.decode_began()
            self._retries.is_over()
        try:
            deliveries = output.record(event)
        except ValueError as error:
            self._attempt_failed(RequestFailed(str(error)))
            return
        self._deliver(deliveries)
        if not deliveries and is_of_decode and output.has_gap:
            # a decode node sends in order and repeats token 1, so a missing token was lost on its way
            self._attempt_failed(RequestFailed("tokens of the decode node were lost"))

    def on_prompt_read(self, read: PromptRead) -> None:
        """Take log probabilities of the prompt, and deliver the tokens that waited for them."""
        if self._legs is None or not self._legs.were_given_to(read.epoch):
            return
        try:
            self._deliver(self._output.record_prompt(read))
        except ValueError as error:
            self._attempt_failed(RequestFailed(str(error)))

    def on_failed(self, failed: Failed, epoch: int) -> None:
        """The node of that epoch reports that an attempt failed."""
        self._moves.heard(failed.attempt)
        self._pull.failed(failed)
        legs, is_transfer = self._legs, failed.code == TransferFailed.code
        if legs is None or failed.attempt != self._output.attempt or not self._needs(epoch):
            return  # an earlier attempt, or a leg that is over: the other leg goes on without it
        self._num_handoff_failures += is_transfer or epoch != legs.decode_epoch
        if not is_transfer:
            self._avoided.add(epoch)
        error = remote_error(failed.code, failed.message)
        if isinstance(error, RequestFailed):
            guilty = legs.epochs if is_transfer else (epoch,)
            self._context.routing.ejections.failed(guilty, asyncio.get_running_loop().time())
        self._attempt_failed(error)

    @property
    def is_moving(self) -> bool:
        """Whether a node was asked to hand it over, or the next one has yet to go on."""
        return self._moves.is_under_way or (self._legs is not None and self._legs.is_moving)

    def move_from(self, source: Node) -> bool:
        """Begin to move it away from `source`. False when it does not generate there, or cannot be moved now."""
        if self.is_moving or self._legs is None or not self._legs.generates_on(source.epoch):
            return False
        return self._moves.begin(source, self._avoided)

    def on_handed_over(self, handed: HandedOver, source: Node) -> None:
        """`source` has handed this request over, so that another node can go on; or it cannot now; or it lends what was
        asked for."""
        output, context = self._output, self._context
        if self._pull.answered(handed, source):
            return
        if self._legs is None:
            self._moves.refuse(handed, source)
            return
        move = self._moves.answered(handed, source)
        if move is None:
            return
        self._legs.leave()
        output.begin_attempt(move.number)
        self.trace.attempt_ended("moved")
        context.counters.num_moves += 1
        sent_us = now_us()
        attempt = Attempt(self.handoff_id, move.number, self._request, tuple(output.token_ids[:-1]))
        self._legs = move.carry_out(attempt, handed, context.routing.registry)
        if self._legs is None:
            output.next_attempt()
            self._retries.begin()
        else:
            output.times.legs_sent(sent_us, source.hello.clock, move.target.hello.clock)
            self.trace.attempt_sent(sent_us, source.node_id, move.target.node_id)

    def on_pulled(self, pulled: Pulled, target: Node) -> None:
        """`target` has the prefix that was to be copied there."""
        self._pull.arrived(pulled, target)

    def on_live(self, node: Node, live: AbstractSet[bytes], received: int) -> None:
        """The node knows the attempts `live`, as in `Legs.are_missed`; this attempt fails when it should be one of
        them and is not, or stands still."""
        legs = self._legs
        if legs is None or not self._needs(node.epoch):
            return
        if legs.are_missed(node, live, received):
            self._attempt_failed(RequestFailed(f"{node.role} node {node.node_id} has forgotten the request"))
        elif legs.stand_still(node, len(self._output.token_ids), asyncio.get_running_loop().time()):
            self._attempt_failed(RequestFailed(f"{node.role} node {node.node_id} does not go on with the request"))

    def on_node_joined(self, epoch: int) -> None:
        """Begin the attempt that has waited for a node."""
        self._retries.node_joined(epoch)

    def stop_waiting(self) -> None:
        """No node is going to join: fail if this one waits for it."""
        self._retries.stop_waiting()

    def on_node_lost(self, node: Node, reason: str) -> None:
        """A node is lost; the attempt fails if one of its legs runs there."""
        self._moves.lost(node)
        self._pull.lost(node)
        legs = self._legs
        if legs is not None and self._needs(node.epoch):
            self._retries.lost(node, is_suspicious=not legs.has_computed(node.epoch))
            lost = RequestFailed(f"{node.role} node {node.node_id} was lost: {reason}")
            self._attempt_failed(lost, node.epoch)

    def fail(self, error: BatonError) -> None:
        """End with `error`, which the reader gets after all earlier deliveries. Does nothing to a flight that has
        ended."""
        if self._has_failed or self._output.has_finished:
            return
        self._has_failed = True
        self._context.counters.num_failed += 1
        self.trace.failed(error.code)
        self._stop()
        self._inbox.fail(error)

    def close(self) -> None:
        """The reader wants no more tokens: cancel the legs that still run. Must be called once."""
        self._context.counters.num_cancelled += not (self._has_failed or self._output.has_finished)
        self.trace.closed()
        if self._legs is not None:
            self._context.routing.ejections.succeeded(self._legs.epoch_at_end)
        self._stop()

    def _deliver(self, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            self._inbox.put(self._index, delivery)
            self._context.counters.num_finished += bool(delivery.finish_reason)
        if self._inbox.is_behind and self._legs is not None and not self._output.has_finished:
            self._pause()

    def _pause(self) -> None:
        """The reader does not keep up: give the place in the batch up until it has taken everything."""
        _log.info("request %s is paused: its client does not read", self.trace.request_id)
        self._cancel_legs()
        self._output.next_attempt()
        self.trace.attempt_ended("paused")
        self._is_paused = True
        self._context.counters.num_pauses += 1
        self._context.node_wait.num_paused += 1
        self._inbox.when_read(self._go_on)
        self._context.node_wait.has_more_room()

    def _go_on(self) -> None:
        if self._is_paused:
            self._end_pause()
            self._retries.begin()

    def _end_pause(self) -> None:
        self._context.node_wait.num_paused -= self._is_paused
        self._is_paused = False

    def _needs(self, epoch: int) -> bool:
        return self._legs is not None and self._legs.run_on(epoch) and not self._output.has_finished

    def _attempt_failed(self, error: BatonError, lost_epoch: int | None = None) -> None:
        """Try again where that can help, otherwise hand the error to the reader. `lost_epoch`: of the node that was
        lost, if that was the reason."""
        final = self._retries.failed(error, () if self._legs is None else self._legs.silent_nodes, lost_epoch)
        if final is not None:
            self.fail(final)
            return
        self._cancel_legs()
        self._context.counters.num_retries += 1
        self._output.next_attempt()
        self.trace.attempt_ended(error.code)
        _log.warning("request %s is tried again, attempt %d: %s", self.trace.request_id, self._output.attempt, error)
        self._retries.begin_again()

    def _start_attempt(self, siblings: Sequence[Flight] = ()) -> None:
        """Choose nodes and send both legs, which `siblings` share. Raises `NoNode`."""
        request, output, context = self._request, self._output, self._context
        if output.prompt is not None and output.prompt.is_whole:
            request = replace(request, params=replace(request.params, prompt_logprobs=None))
        output_ids, now_s = tuple(output.token_ids), asyncio.get_running_loop().time()
        asked = RouteRequest(
            request.model,
            request.prompt,
            output_ids,
            request.max_tokens_behind(len(output_ids)),
            request.goals,
            self._avoided,
            allows_handoff=self._num_handoff_failures < _MAX_HANDOFF_FAILURES,
            computes_all=output.awaits_prompt,
            confinement=self._retries.confinement,
            may_refuse=output.attempt == 1 and not output_ids,
            may_pull=output.attempt == 1 and not siblings,
        )
        route = context.routing.choose(asked, now_s)
        self._retries.begins_at(route)
        forks = tuple(sibling.handoff_id for sibling in siblings)
        pull_number = 0 if route.pull is None else output.reserve_attempt()
        awaited = None if route.pull is None else route.pull.awaited_as(pull_number)
        attempt = Attempt(self.handoff_id, output.attempt, request, output_ids, forks, awaited)
        sent_us = now_us()  # before they leave: a node may begin at once
        for flight, legs in zip((self, *siblings), send_legs(context.sender, route, attempt, now_s), strict=True):
            flight._take_legs(legs, route, sent_us)
        if route.pull is not None:
            self._pull.begin(route.pull, request.prompt, pull_number)

    def _take_legs(self, legs: Legs, route: Route, sent_us: int) -> None:
        output, counters = self._output, self._context.counters
        nodes = [route.decode] if route.prefill is None else [route.prefill, route.decode]
        output.times.legs_sent(sent_us, *(node.hello.clock for node in nodes))
        self._cached.begin(output.attempt, is_split=route.prefill is not None)
        self._legs = legs
        prefill_node = "" if route.prefill is None else route.prefill.node_id
        self.trace.attempt_sent(sent_us, prefill_node, route.decode.node_id)
        counters.num_handoff_attempts += route.prefill is not None
        counters.num_decode_only_attempts += route.prefill is None
        counters.num_kept_prompts += route.is_kept

    def _cancel_legs(self) -> None:
        self._moves.end()
        self._pull.end()
        self._retries.is_over()
        if self._legs is not None:
            self._legs.cancel(asyncio.get_running_loop().time())
            self._legs = None

    def _stop(self) -> None:
        self._deadline.cancel()
        self._retries.stop()
        self._end_pause()
        self._cancel_legs()
