"""EngineCore: the verbs every program of Baton drives an engine with, and `step()`.

Owns the block pool, the scheduler, the runner and the leases, and is the only place that moves blocks between them.
Does not know which program drives it, where requests come from, or how KV travels: there are no roles in here.

A block has an owner at every moment: the pool, a request, or a lease. Requests become leases (`first_token_only`:
their blocks stay for whoever continues them elsewhere) and leases become requests (`add_reserved`: somebody else has
written the KV). Invariant, checked by `check`: blocks of requests and leases are exactly the held blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from engine.api.errors import BatonError
from engine.api.messages import NodeStatus
from engine.api.sampling import DecodingParams
from engine.cache.block_pool import BlockPool, CacheChanges
from engine.cache.hashing import extend_hashes, root_hash
from engine.cache.leases import LeaseTable
from engine.runner.model_runner import Runner
from engine.scheduler.request import Request, RequestKey, RequestOutput
from engine.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks set aside for KV that somebody else will write.

    `block_table` covers all tokens; the blocks of its first `num_cached_tokens` tokens hold their KV already. The
    others, with their generations, are in `missing_block_ids` and `missing_generations`, in sequence order.
    """

    key: RequestKey
    block_table: list[int]
    num_cached_tokens: int
    missing_block_ids: tuple[int, ...]
    missing_generations: tuple[int, ...]


class StepFailed(BatonError):
    """The runner could not compute a step. `keys`: the requests in it, unchanged; its cause is the runner's error."""

    code = "internal_error"

    def __init__(self, keys: list[RequestKey]) -> None:
        super().__init__(f"a step with {len(keys)} requests could not be computed")
        self.keys = keys


class EngineCore:
    """One model on one device."""

    def __init__(self, pool: BlockPool, scheduler: Scheduler, runner: Runner, fingerprint: str) -> None:
        self.leases: LeaseTable[RequestKey] = LeaseTable()
        self._pool = pool
        self._scheduler = scheduler
        self._runner = runner
        self._fingerprint = fingerprint

    @property
    def has_work(self) -> bool:
        """Whether a step could compute something (it may still find no room)."""
        return self._scheduler.has_work

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
        stay leased until `release(key)`: somebody may be reading them, also when that token ended it.

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
        if key in self.leases or self._scheduler.get(key) is not None:
            raise ValueError(f"{key!r} is in use already")

    def reserve(
        self, key: RequestKey, token_ids: Sequence[int], deadline_s: float, *, cache_salt: bytes = b""
    ) -> Reservation | None:
        """Lease blocks for the KV of `token_ids`, reusing what the prefix cache has. None when there is no room now,
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
        self.leases.add(key, "reservation", block_table, deadline_s)
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
        """Continue a request whose KV now lies in the reserved blocks; its lease ends and its blocks become cached.

        `token_ids` includes the token drawn elsewhere. Raises as `add`, and then releases the blocks.
        """
        request = self._request(reservation.key, token_ids, params, num_prompt_tokens, cache_salt)
        lease = self.leases.end(reservation.key)
        if lease is None:
            raise KeyError(f"{reservation.key!r} holds no reservation")
        request.block_table = lease.block_ids
        request.num_computed_tokens = num_computed_tokens
        request.num_cached_tokens = min(reservation.num_cached_tokens, num_prompt_tokens)
        request.num_published_blocks = reservation.num_cached_tokens // self._scheduler.limits.block_size
        try:
            self._scheduler.add_computed(request)
        except BatonError:
            self._pool.release(lease.block_ids)
            raise

    def block_table(self, key: RequestKey) -> Sequence[int]:
        """Blocks of a live request or of a lease, in sequence order; empty when there is neither."""
        request = self._scheduler.get(key)
        if request is not None:
            return request.block_table
        lease = self.leases.get(key)
        return lease.block_ids if lease is not None else ()

    def release(self, key: RequestKey) -> bool:
        """End the lease of `key` and give its blocks back. False when it holds none."""
        lease = self.leases.end(key)
        if lease is not None:
            self._pool.release(lease.block_ids)
        return lease is not None

    def abort(self, key: RequestKey) -> bool:
        """Drop a request in whatever state, with its blocks. Leases stay. False when it is unknown."""
        request = self._scheduler.remove(key)
        if request is not None:
            self._pool.release(request.block_table)
        return request is not None

    def step(self, keep_until_s: float = 0.0) -> list[RequestOutput]:
        """Compute one step: schedule, execute, apply. Empty when nothing fits now.

        Blocks of requests that leave are released, or leased until `keep_until_s` (see `first_token_only`).
        Raises `StepFailed` when the runner does; no request of the step has advanced then.
        """
        step = self._scheduler.schedule()
        if not step.requests:
            return []
        try:
            sampled = self._runner.execute(step)
        except Exception as error:
            raise StepFailed([request.key for request in step.requests]) from error
        outputs = self._scheduler.apply(step, sampled)
        for output in outputs:
            if output.has_left:
                self._retire(output, keep_until_s)
        return outputs

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
        for lease in self.leases.all():
            owned.update(lease.block_ids)
        if len(owned) != self._pool.num_held:
            raise RuntimeError(f"{len(owned)} blocks have an owner, {self._pool.num_held} are held")

    def _retire(self, output: RequestOutput, keep_until_s: float) -> None:
        request = self._scheduler.remove(output.key)
        if request is None:
            return
        if request.first_token_only:
            self.leases.add(output.key, "kept", request.block_table, keep_until_s)
        else:
            self._pool.release(request.block_table)

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
