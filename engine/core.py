"""EngineCore: the verbs every program of Baton drives an engine with, and `step()`.

Owns the block pool, the scheduler, the runner and the blocks kept for somebody, and is the only place that moves blocks
between them. Does not know which program drives it, where requests come from, or how KV travels: there are no roles in
here.

A block has an owner at every moment: the pool, a request, or the one it is kept for. Requests become kept blocks
(`first_token_only`: they stay for whoever continues them elsewhere) and kept blocks become requests (`add_reserved`:
somebody else has written the KV). How long blocks are kept is a lease of the program that asked for them: it calls
`release`. Invariant, checked by `check`: blocks of requests, kept blocks, and those that wait for a step under way are
exactly the held blocks.

Where the runner allows it, a step is launched on top of the one that is still being computed, so that the device need
not wait for the host. At most two are under way, and at most one between two calls of `step`. A request can therefore
end, or be aborted, while the device still writes into its blocks. They go back to the pool when that step was
collected, not earlier: the next owner may be another node, whose writes are not ordered with those of this device.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from device.base import DeviceFailed
from engine.attention.base import LayerStored
from engine.cache.block_pool import BlockPool, BlockTable, CacheChanges
from engine.cache.hashing import extend_hashes, root_hash
from engine.runner.base import Runner, RunningStep
from engine.scheduler.request import Request, RequestKey, RequestOutput, SampledToken, Step
from engine.scheduler.scheduler import Scheduler
from wire.errors import BatonError
from wire.messages import NodeStatus
from wire.sampling import DecodingParams

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks kept for KV that somebody else will write.

    `block_table` covers all tokens; the blocks of its first `num_cached_tokens` tokens hold their KV already. The
    others, with their generations, are in `missing_block_ids` and `missing_generations`, in sequence order.
    """

    key: RequestKey
    block_table: BlockTable
    num_cached_tokens: int
    missing_block_ids: tuple[int, ...]
    missing_generations: tuple[int, ...]


class StepFailed(BatonError):
    """The runner could not compute a step; its cause is the runner's error.

    `keys`: the requests in it that are still live, as they were before it. Nothing is under way any more: a step that
    was launched on top of it is void as well, and its requests, others among them, are where they were before both.
    """

    code = "internal_error"

    def __init__(self, keys: list[RequestKey]) -> None:
        super().__init__(f"a step with {len(keys)} requests could not be computed")
        self.keys = keys


StepWatch: TypeAlias = Callable[[Step], LayerStored | None]
"""Called with a step before it is launched; what it returns is called after each layer whose KV is stored."""


def unwatched(step: Step) -> None:
    """Nobody looks."""


@dataclass(frozen=True, slots=True)
class _NotLaunched:
    """What stands for a step whose launch failed, until its turn to be collected."""

    error: Exception

    def result(self) -> Mapping[RequestKey, SampledToken]:
        """See `RunningStep.result`."""
        raise self.error


@dataclass(slots=True)
class _StepUnderWay:
    """`tables`: blocks that the step may still write into, and that nobody else holds."""

    step: Step
    running: RunningStep
    tables: list[BlockTable] = field(default_factory=list)


def _wait_out(running: RunningStep) -> None:
    """Until a step is over whose result is of no use. Raises `DeviceFailed`."""
    try:
        running.result()
    except DeviceFailed:
        raise
    except Exception as error:  # the failure that made it useless is reported
        _log.warning("a step beside one that failed has failed too: %s", error)


class EngineCore:
    """One model on one device."""

    def __init__(self, pool: BlockPool, scheduler: Scheduler, runner: Runner, fingerprint: str) -> None:
        self._kept: dict[RequestKey, BlockTable] = {}
        self._under_way: deque[_StepUnderWay] = deque()
        self._pool = pool
        self._scheduler = scheduler
        self._runner = runner
        self._fingerprint = fingerprint

    @property
    def has_work(self) -> bool:
        """Whether `step` could do something (it may still find no room)."""
        return self._scheduler.has_work or self.is_step_under_way

    @property
    def is_step_under_way(self) -> bool:
        """Whether a step was launched whose result `step` has not taken yet."""
        return bool(self._under_way)

    @property
    def max_request_tokens(self) -> int:
        """Longest prompt plus output that fits."""
        return self._scheduler.limits.max_request_tokens

    @property
    def num_preemptions(self) -> int:
        """Requests that lost their blocks and were computed again, since the start."""
        return self._scheduler.num_preemptions

    def status(self, loop_age_s: float = 0.0) -> NodeStatus:
        """Load and block counts now."""
        return NodeStatus(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_free_blocks=self._pool.num_free,
            num_cached_blocks=self._pool.num_cached,
            num_held_blocks=self._pool.num_held,
            loop_age_s=loop_age_s,
        )

    def add(
        self,
        key: RequestKey,
        token_ids: Sequence[int],
        params: DecodingParams,
        *,
        num_prompt_tokens: int | None = None,
        cache_salt: bytes = b"",
        first_token_only: bool = False,
    ) -> None:
        """Compute and continue `token_ids`. With `first_token_only` the request leaves after one token and its blocks
        are kept until `release(key)`: somebody may be reading them, also when that token ended it.

        `num_prompt_tokens` (default: all) says how many of them count as prompt; the rest are earlier output.
        Raises `ContextLengthExceeded` when it can never fit, `Overloaded` when the queue is full, `InvalidRequest` for
        token ids outside the vocabulary and `ValueError` for a key in use.
        """
        request = self._request(key, token_ids, params, num_prompt_tokens, cache_salt)
        request.first_token_only = first_token_only
        self._require_new(key)
        self._scheduler.add(request)

    def check_size(self, num_tokens: int) -> None:
        """Raise `ContextLengthExceeded` when so many known tokens leave no room for output."""
        self._scheduler.check_size(num_tokens)

    def _require_new(self, key: RequestKey) -> None:
        if key in self._kept or self._scheduler.get(key) is not None:
            raise ValueError(f"{key!r} is in use already")

    def reserve(self, key: RequestKey, token_ids: Sequence[int], *, cache_salt: bytes = b"") -> Reservation | None:
        """Keep blocks for the KV of `token_ids`, reusing what the prefix cache has. None when there is no room now,
        or when a request of the engine itself waits for room: steady reservations must not starve it.

        Raises `ContextLengthExceeded` when there will never be room.
        """
        self.check_size(len(token_ids))
        self._require_new(key)
        if self._scheduler.is_short_of_blocks:
            return None
        hashes: list[bytes] = []
        extend_hashes(hashes, token_ids, self._scheduler.limits.block_size, self._root(cache_salt))
        taken = self._scheduler.take_prefix(hashes, len(token_ids), len(token_ids))
        if taken is None:
            return None
        block_table, num_cached_tokens = taken
        self._kept[key] = block_table
        missing = tuple(block_table[num_cached_tokens // self._scheduler.limits.block_size :])
        generations = tuple(self._pool.generation(block_id) for block_id in missing)
        return Reservation(key, block_table, num_cached_tokens, missing, generations)

    def add_reserved(
        self,
        reservation: Reservation,
        token_ids: Sequence[int],
        params: DecodingParams,
        *,
        num_prompt_tokens: int,
        num_computed_tokens: int,
        cache_salt: bytes = b"",
    ) -> None:
        """Continue a request whose KV now lies in the reserved blocks; they become its own, and cached.

        `token_ids` includes the token drawn elsewhere. Raises as `add`, and then releases the blocks.
        """
        request = self._request(reservation.key, token_ids, params, num_prompt_tokens, cache_salt)
        block_table = self._kept.pop(reservation.key, None)
        if block_table is None:
            raise KeyError(f"{reservation.key!r} holds no reservation")
        request.block_table = block_table
        request.num_computed_tokens = num_computed_tokens
        request.num_cached_tokens = min(reservation.num_cached_tokens, num_prompt_tokens)
        request.num_published_blocks = reservation.num_cached_tokens // self._scheduler.limits.block_size
        try:
            self._scheduler.add_computed(request)
        except BatonError:
            self._pool.release(block_table)
            raise

    def block_table(self, key: RequestKey) -> Sequence[int]:
        """Blocks of a live request, or those kept under this key, in sequence order; empty when there are neither."""
        request = self._scheduler.get(key)
        return request.block_table if request is not None else self._kept.get(key, ())

    def release(self, key: RequestKey) -> bool:
        """Give the blocks kept under `key` back. False when there are none."""
        block_table = self._kept.pop(key, None)
        if block_table is not None:
            self._pool.release(block_table)
        return block_table is not None

    def abort(self, key: RequestKey) -> bool:
        """Drop a request in whatever state, with its blocks. Kept ones stay. False when it is unknown.

        The key is free at once; what a step under way draws for the request reaches nobody.
        """
        request = self._scheduler.remove(key)
        if request is not None:
            self._release(request)
        return request is not None

    def step(self, watch: StepWatch = unwatched) -> list[RequestOutput]:
        """The outputs of the oldest step under way, after launching what can be launched on top of it; with none under
        way, of a new one. Empty when nothing fits now, or when all requests of the step were aborted.

        Blocks of requests that leave are released, or kept (see `first_token_only`). `watch` is told of each step
        before it is launched, and of its layers as they are stored; steps are collected in the order of their launch.
        Raises `StepFailed` when that step could not be launched or computed; no request has advanced since the last
        outputs then. `DeviceFailed` passes: the process must end.
        """
        if not self._under_way:
            self._launch(self._scheduler.schedule(), watch)
        if not self._under_way:
            return []
        is_sound = not isinstance(self._under_way[0].running, _NotLaunched)
        if self._runner.overlaps and is_sound and (ahead := self._scheduler.schedule_ahead()) is not None:
            self._launch(ahead, watch)
        return self._collect()

    def _launch(self, step: Step, watch: StepWatch) -> None:
        if not step.requests:
            return
        layer_stored = watch(step)
        try:
            running: RunningStep = self._runner.launch(step, layer_stored)
        except DeviceFailed:
            raise
        except Exception as error:  # the step before it, if any, is collected first
            running = _NotLaunched(error)
        self._scheduler.advance(step)
        self._under_way.append(_StepUnderWay(step, running))

    def _collect(self) -> list[RequestOutput]:
        """Wait for the oldest step under way, and apply what it drew."""
        oldest = self._under_way[0]
        try:
            sampled = oldest.running.result()
        except DeviceFailed:
            raise
        except Exception as error:
            raise self._void() from error
        self._under_way.popleft()
        self._release_tables(oldest)
        outputs = self._scheduler.apply(oldest.step, sampled)
        for output in outputs:
            if output.has_left:
                self._retire(output)
        return outputs

    def _void(self) -> StepFailed:
        """Forget every step under way: the oldest failed. The one on top of it is waited for: it must not write any
        more into blocks that can be given back from here on.
        """
        failed, *others = self._under_way
        for under_way in others:
            _wait_out(under_way.running)
        for under_way in (*reversed(others), failed):
            self._scheduler.rewind(under_way.step)
            self._release_tables(under_way)
        self._under_way.clear()
        return StepFailed(self._scheduler.keys_of(failed.step))

    def has(self, key: RequestKey) -> bool:
        """Whether a live request has this key."""
        return self._scheduler.get(key) is not None

    def request_keys(self) -> list[RequestKey]:
        """Keys of all live requests."""
        return self._scheduler.live_keys()

    def take_cache_changes(self) -> CacheChanges:
        """Prefix blocks stored and evicted since the last call."""
        return self._pool.take_changes()

    def cached_hashes(self) -> list[bytes]:
        """All findable prefix blocks."""
        return self._pool.published_hashes()

    def check(self) -> None:
        """Raise `RuntimeError` when blocks are leaked, shared wrongly or freed while in use. O(pool), for tests."""
        self._pool.check()
        owned: Counter[int] = Counter()
        for key in self._scheduler.live_keys():
            owned.update(self.block_table(key))
        for block_table in self._kept.values():
            owned.update(block_table)
        for under_way in self._under_way:
            for block_table in under_way.tables:
                owned.update(block_table)
        if len(owned) != self._pool.num_held:
            raise RuntimeError(f"{len(owned)} blocks have an owner, {self._pool.num_held} are held")

    def _retire(self, output: RequestOutput) -> None:
        request = self._scheduler.remove(output.key)
        if request is None:
            return
        if request.first_token_only:
            self._kept[output.key] = request.block_table
        else:
            self._release(request)

    def _release(self, request: Request) -> None:
        """Give the blocks of a removed request back, once no step writes into them."""
        if request.num_steps_under_way:
            self._under_way[-1].tables.append(request.block_table)
        else:
            self._pool.release(request.block_table)

    def _release_tables(self, collected: _StepUnderWay) -> None:
        for block_table in collected.tables:
            self._pool.release(block_table)

    def _request(
        self,
        key: RequestKey,
        token_ids: Sequence[int],
        params: DecodingParams,
        num_prompt_tokens: int | None,
        cache_salt: bytes,
    ) -> Request:
        return Request(
            key=key,
            token_ids=list(token_ids),
            num_prompt_tokens=len(token_ids) if num_prompt_tokens is None else num_prompt_tokens,
            params=params,
            hash_root=self._root(cache_salt),
            max_total_tokens=self.max_request_tokens,
        )

    def _root(self, cache_salt: bytes) -> bytes:
        return root_hash(self._fingerprint, cache_salt)
