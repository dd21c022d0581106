from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.engine.attention.base import LayerStored
from baton.engine.build import Engine, build_engine
from baton.engine.cache.block_pool import BlockPool
from baton.engine.core import EngineCore
from baton.engine.handoffs import FirstToken
from baton.engine.runner.base import RunningStep
from baton.engine.runner.kv_memory import allocate_private
from baton.engine.scheduler.limits import SchedulerLimits
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.step import RequestOutput, SampledToken, Step
from baton.engine.settings import EngineSettings
from baton.engine.steps_in_flight import StepFailed
from baton.wire.errors import ContextLengthExceeded, InvalidRequest, InvalidSetting, ModelNotFound
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams
from tests.checkpoints import make_checkpoint
from tests.computed_step import ComputedStep
from tests.engine.models.adapters.adapter_folders import merged, write_adapter
from tests.request_keys import A, B, C, key_of

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
BLOCK_SIZE = 8
NUM_NEW = 12
GREEDY = DecodingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
PROMPT_LENGTHS = (1, 7, 8, 16, 29, 50)


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + num_tokens)
    return torch.randint(0, 300, (num_tokens,), generator=generator).tolist()


@pytest.fixture(scope="module", params=FAMILIES)
def any_checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / request.param, request.param)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "qwen3", "qwen3")


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> Callable[[Sequence[int]], list[int]]:
    return Reference(checkpoint)


class Reference:
    """Greedy continuations by transformers."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._known: dict[tuple[int, ...], list[int]] = {}

    def __call__(self, token_ids: Sequence[int]) -> list[int]:
        key = tuple(token_ids)
        if key not in self._known:
            ids = torch.tensor([key])
            options: dict[str, Any] = {"do_sample": False, "max_new_tokens": NUM_NEW, "eos_token_id": None}
            with torch.inference_mode():
                found = self._model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)
            self._known[key] = found[0, len(key) :].tolist()
        return self._known[key]


def new_engine(folder: Path, adapters: Mapping[str, Path] | None = None, **settings: Any) -> Engine:
    chosen = {"block_size": BLOCK_SIZE, "num_blocks": 64, "num_threads": 1, **settings}
    return build_engine(EngineSettings(model=str(folder), **chosen), allocate_private, adapters=adapters)


def run(core: EngineCore, max_steps: int = 500) -> dict[RequestKey, list[int]]:
    """Step until nothing is left, checking the blocks after every step. Tokens by request."""
    tokens: dict[RequestKey, list[int]] = {}
    for _ in range(max_steps):
        if not core.has_work:
            return tokens
        note(core.step(), tokens)
        core.check()
    raise AssertionError(f"{core.request_keys()} did not finish")


def note(outputs: Iterable[RequestOutput], tokens: dict[RequestKey, list[int]]) -> None:
    for output in outputs:
        if output.tokens:
            tokens.setdefault(output.key, []).extend(output.token_ids)


def num_held(core: EngineCore) -> int:
    return core.status().num_held_blocks


@pytest.mark.parametrize("budget", [BLOCK_SIZE, 3 * BLOCK_SIZE, 512])
def test_greedy_tokens_of_a_batch_are_those_of_transformers(any_checkpoint: Path, budget: int) -> None:
    core = new_engine(any_checkpoint, max_num_batched_tokens=budget).core
    prompts = {key_of(length): prompt(length) for length in PROMPT_LENGTHS}
    for key, token_ids in prompts.items():
        core.add(key, Prompt.of(token_ids), GREEDY)
    reference = Reference(any_checkpoint)
    assert run(core) == {key: reference(token_ids) for key, token_ids in prompts.items()}
    assert num_held(core) == 0


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_tokens_are_the_same_with_and_without_prefix_caching(
    checkpoint: Path, expected: Reference, enable_prefix_caching: bool
) -> None:
    core = new_engine(checkpoint, enable_prefix_caching=enable_prefix_caching).core
    beginning = prompt(24)
    for round_number in range(2):
        for tail in range(3):
            core.add(key_of(tail, 1 + round_number), Prompt.of([*beginning, *prompt(tail, seed=tail)]), GREEDY)
        found = run(core)
        assert found == {
            key_of(tail, 1 + round_number): expected([*beginning, *prompt(tail, seed=tail)]) for tail in range(3)
        }
    core.add(key_of("again"), Prompt.of(beginning), GREEDY)
    assert core.step()[0].num_cached_tokens == (16 if enable_prefix_caching else 0)
    assert run(core)[key_of("again")] == expected(beginning)[1:]


def test_tokens_are_the_same_after_preemption(checkpoint: Path, expected: Reference) -> None:
    core = new_engine(checkpoint, num_blocks=9, max_num_batched_tokens=32).core
    prompts = {key_of(number): prompt(14, seed=number) for number in range(5)}
    for key, token_ids in prompts.items():
        core.add(key, Prompt.of(token_ids), GREEDY)
    assert run(core) == {key: expected(token_ids) for key, token_ids in prompts.items()}
    assert core.status().num_preemptions > 0


def test_a_seeded_stream_continues_exactly_after_an_interruption(checkpoint: Path) -> None:
    params = DecodingParams(temperature=1.0, seed=7, max_tokens=NUM_NEW, ignore_eos=True, frequency_penalty=0.5)
    token_ids = prompt(13)
    core = new_engine(checkpoint).core
    core.add(key_of("whole"), Prompt.of(token_ids), params)
    whole = run(core)[key_of("whole")]
    other = new_engine(checkpoint).core
    other.add(key_of("rest"), Prompt.of(token_ids), params, output_ids=whole[:5])
    assert run(other)[key_of("rest")] == whole[5:]


def hand_over(
    source: Engine, target: Engine, token_ids: list[int], key: RequestKey = A, adapter: bytes = b""
) -> list[int]:
    """Prefill on one engine, copy the KV, continue on the other. Returns all tokens."""
    handed = Prompt.of(token_ids, adapter=adapter)
    reservation = target.core.handoffs.reserve(key, handed)
    assert reservation is not None
    source.core.add(key, handed, GREEDY, first_token_only=True)
    first = run(source.core)[key]
    target.core.check()
    num_cached_blocks = reservation.num_cached_tokens // BLOCK_SIZE
    sent = source.core.handoffs.block_table(key)[num_cached_blocks:]
    for source_id, target_id in zip(sent, reservation.missing_block_ids, strict=True):
        target.memory.blocks[target_id] = source.memory.blocks[source_id]
    assert source.core.handoffs.release(key)
    source.core.check()
    firsts = [FirstToken(key, GREEDY, first[0])]
    target.core.handoffs.add_reserved(reservation, handed, firsts)
    target.core.check()
    return first + run(target.core)[key]


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 29])
def test_kv_copied_into_reserved_blocks_continues_with_the_same_tokens(
    checkpoint: Path, expected: Reference, length: int
) -> None:
    source, target = new_engine(checkpoint), new_engine(checkpoint)
    assert hand_over(source, target, prompt(length)) == expected(prompt(length))
    assert num_held(source.core) == num_held(target.core) == 0
    assert source.core.status().num_cached_blocks == length // BLOCK_SIZE
    assert target.core.status().num_cached_blocks == (length + NUM_NEW - 1) // BLOCK_SIZE


def test_a_request_of_an_adapter_goes_on_where_that_is_loaded_and_is_refused_elsewhere(
    checkpoint: Path, tmp_path: Path, expected: Reference
) -> None:
    folder = write_adapter(tmp_path / "adapter", checkpoint)
    changed = Reference(merged(checkpoint, folder, tmp_path / "merged"))
    source, target, bare = (new_engine(checkpoint, each) for each in ({"a": folder}, {"b": folder}, None))
    digest = source.adapters["a"]
    assert hand_over(source, target, prompt(29), adapter=digest) == changed(prompt(29)) != expected(prompt(29))
    # what both have of it now is of no use to the base
    assert hand_over(source, target, prompt(29), B) == expected(prompt(29))
    for refuse in (bare.core.handoffs.reserve, lambda key, of: bare.core.add(key, of, GREEDY)):
        with pytest.raises(ModelNotFound, match=digest.hex()):
            refuse(A, Prompt.of(prompt(29), adapter=digest))
    bare.core.check()


def test_only_what_the_receiver_lacks_is_reserved_anew(checkpoint: Path, expected: Reference) -> None:
    source, target = new_engine(checkpoint), new_engine(checkpoint)
    hand_over(source, target, prompt(16), key_of("first"))
    longer = [*prompt(16), *prompt(9, seed=3)]
    reservation = target.core.handoffs.reserve(key_of("peek"), Prompt.of(longer))
    assert reservation is not None
    assert (reservation.num_cached_tokens, len(reservation.missing_block_ids)) == (16, 2)
    target.core.handoffs.release(key_of("peek"))
    assert hand_over(source, target, longer, key_of("second")) == expected(longer)


def test_a_prompt_known_to_the_last_token_needs_no_blocks(checkpoint: Path, expected: Reference) -> None:
    source, target = new_engine(checkpoint), new_engine(checkpoint)
    hand_over(source, target, prompt(16), key_of("first"))
    reservation = target.core.handoffs.reserve(key_of("peek"), Prompt.of(prompt(16)))
    assert reservation is not None
    assert reservation.missing_block_ids == ()
    target.core.handoffs.release(key_of("peek"))
    assert hand_over(source, target, prompt(16), key_of("second")) == expected(prompt(16))


def test_a_reservation_waits_its_turn_and_names_generations(checkpoint: Path) -> None:
    core = new_engine(checkpoint, num_blocks=4).core
    first = core.handoffs.reserve(A, Prompt.of(prompt(16)))
    assert first is not None
    assert core.handoffs.reserve(B, Prompt.of(prompt(17))) is None
    core.check()
    assert core.handoffs.release(A)
    again = core.handoffs.reserve(A, Prompt.of(prompt(30)))
    assert again is not None
    generations = dict(zip(again.missing_block_ids, again.missing_generations, strict=True))
    assert all(generations[block_id] == 2 for block_id in first.missing_block_ids)
    with pytest.raises(ContextLengthExceeded):
        core.handoffs.reserve(C, Prompt.of(prompt(32)))


def test_another_salt_does_not_see_the_cache(checkpoint: Path) -> None:
    core = new_engine(checkpoint).core
    core.add(A, Prompt.of(prompt(20), cache_salt=b"one"), GREEDY)
    run(core)
    for salt, cached in ((b"one", 16), (b"two", 0)):
        reservation = core.handoffs.reserve(key_of(cached), Prompt.of(prompt(20), cache_salt=salt))
        assert reservation is not None
        assert reservation.num_cached_tokens == cached


def test_blocks_of_a_first_token_only_are_held_until_release(checkpoint: Path) -> None:
    core = new_engine(checkpoint).core
    core.add(A, Prompt.of(prompt(20)), GREEDY, first_token_only=True)
    assert core.is_live(A)
    assert core.step()[0].has_left
    assert not core.is_live(A)
    assert not core.has_work
    assert len(core.handoffs.block_table(A)) == num_held(core) == 3
    assert not core.abort(A)
    core.check()
    assert core.handoffs.release(A)
    assert not core.handoffs.release(A)
    assert num_held(core) == 0


def test_blocks_are_held_also_when_the_first_token_ends_the_request(checkpoint: Path) -> None:
    core = new_engine(checkpoint).core
    core.add(A, Prompt.of(prompt(9)), DecodingParams(temperature=0, max_tokens=1), first_token_only=True)
    assert core.step()[0].finish_reason == "length"
    assert core.handoffs.release(A)
    assert num_held(core) == 0


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_an_abort_in_each_state_releases_all_blocks(checkpoint: Path, num_steps: int) -> None:
    core = new_engine(checkpoint, max_num_batched_tokens=BLOCK_SIZE, num_blocks=10).core
    for number in range(3):
        core.add(key_of(number), Prompt.of(prompt(20, seed=number)), GREEDY)
    for _ in range(num_steps):
        core.step()
    for number in (2, 0, 1):
        assert core.abort(key_of(number))
        core.check()
    assert not core.abort(key_of(0))
    assert num_held(core) == 0


def test_aborting_a_request_that_came_with_its_kv_releases_its_blocks(checkpoint: Path) -> None:
    core = new_engine(checkpoint).core
    reservation = core.handoffs.reserve(A, Prompt.of(prompt(16)))
    assert reservation is not None
    assert not core.abort(A)
    core.handoffs.add_reserved(reservation, Prompt.of(prompt(16)), [FirstToken(A, GREEDY, 5)])
    assert core.abort(A)
    core.check()
    assert num_held(core) == 0


class FlakyRunner:
    """Raises as long as it is broken."""

    is_asynchronous = False

    def __init__(self) -> None:
        self.is_broken = True

    def launch(self, step: Step, layer_stored: LayerStored | None = None) -> RunningStep:
        if self.is_broken:
            raise OSError("device lost")
        return ComputedStep({each.key: (SampledToken(1, None),) for each in step.requests if each.needs_sample})


def flaky_core() -> tuple[EngineCore, FlakyRunner]:
    pool, runner = BlockPool(16), FlakyRunner()
    return EngineCore(pool, Scheduler(pool, SchedulerLimits(4, 4, 16, 64), frozenset()), runner, "f"), runner


def test_a_step_that_fails_names_its_requests_and_can_be_tried_again() -> None:
    core, runner = flaky_core()
    for key in (A, B):
        core.add(key, Prompt.of(prompt(5)), GREEDY)
    for _ in range(2):
        with pytest.raises(StepFailed) as caught:
            core.step()
        assert caught.value.keys == [A, B]
        assert isinstance(caught.value.__cause__, OSError)
        core.check()
    runner.is_broken = False
    assert run(core) == {A: [1] * NUM_NEW, B: [1] * NUM_NEW}


class SilentRunner(FlakyRunner):
    """Computes no number for the request "bad"."""

    def launch(self, step: Step, layer_stored: LayerStored | None = None) -> RunningStep:
        self.is_broken = False
        tokens = super().launch(step).result()
        return ComputedStep({key: token for key, token in tokens.items() if key != key_of("bad")})


@pytest.mark.parametrize("first_token_only", [False, True])
def test_a_request_of_nan_leaves_with_its_blocks_and_fails_no_other(first_token_only: bool) -> None:
    pool = BlockPool(16)
    core = EngineCore(pool, Scheduler(pool, SchedulerLimits(4, 4, 16, 64), frozenset()), SilentRunner(), "f")
    core.add(key_of("bad"), Prompt.of(prompt(5)), GREEDY, first_token_only=first_token_only)
    core.add(key_of("good"), Prompt.of(prompt(5)), GREEDY)
    outputs = {output.key: output for output in core.step()}
    assert (outputs[key_of("bad")].has_failed, outputs[key_of("bad")].has_left, outputs[key_of("bad")].tokens) == (
        True,
        True,
        (),
    )
    assert (outputs[key_of("good")].has_failed, outputs[key_of("good")].has_left) == (False, False)
    core.check()
    assert run(core)[key_of("good")] == [1] * (NUM_NEW - 1)
    assert core.handoffs.release(key_of("bad")) is first_token_only
    assert num_held(core) == 0


def test_a_key_in_use_is_refused() -> None:
    core, _ = flaky_core()
    core.add(A, Prompt.of(prompt(5)), GREEDY)
    with pytest.raises(ValueError, match="in use"):
        core.add(A, Prompt.of(prompt(5)), GREEDY)
    with pytest.raises(ValueError, match="in use"):
        core.handoffs.reserve(A, Prompt.of(prompt(5)))


def test_reservations_wait_behind_requests_that_are_short_of_blocks() -> None:
    pool = BlockPool(4)
    core = EngineCore(pool, Scheduler(pool, SchedulerLimits(4, 4, 16, 16), frozenset()), SilentRunner(), "f")
    assert core.handoffs.reserve(key_of("held"), Prompt.of(prompt(8))) is not None
    core.add(key_of("big"), Prompt.of(prompt(12)), GREEDY)
    core.step()
    assert core.handoffs.reserve(key_of("late"), Prompt.of(prompt(4))) is None
    core.handoffs.release(key_of("held"))
    core.step()
    assert core.handoffs.reserve(key_of("late"), Prompt.of(prompt(4))) is not None
    core.check()


def test_a_delivered_request_joins_at_once_beside_prompts_that_fill_every_step() -> None:
    pool = BlockPool(64)
    core = EngineCore(pool, Scheduler(pool, SchedulerLimits(4, 8, 16, 256), frozenset()), SilentRunner(), "f")
    for name in ("long", "longer"):
        core.add(key_of(name), Prompt.of(prompt(80)), GREEDY)
    core.step()
    reservation = core.handoffs.reserve(A, Prompt.of(prompt(8)))
    assert reservation is not None
    core.handoffs.add_reserved(reservation, Prompt.of(prompt(8)), [FirstToken(A, GREEDY, 1)])
    assert [output.key for output in core.step() if output.tokens] == [A]
    core.check()


def test_token_ids_outside_the_vocabulary_are_refused(checkpoint: Path) -> None:
    core = new_engine(checkpoint).core
    with pytest.raises(InvalidRequest):
        core.add(A, Prompt.of([1, 2, 10**6]), GREEDY)
    with pytest.raises(InvalidRequest):
        core.add(A, Prompt.of([1, 2]), DecodingParams(stop_token_ids=(10**6,)))
    assert not core.has_work


def test_requests_of_a_failed_step_can_be_aborted() -> None:
    core, _ = flaky_core()
    core.add(A, Prompt.of(prompt(5)), GREEDY)
    with pytest.raises(StepFailed):
        core.step()
    assert core.abort(A)
    core.check()
    assert num_held(core) == 0
    assert core.step() == []


def test_cache_changes_are_what_became_findable(checkpoint: Path) -> None:
    core = new_engine(checkpoint).core
    core.add(A, Prompt.of(prompt(20)), GREEDY)
    run(core)
    changes = core.take_cache_changes()
    assert changes.stored == core.cached_hashes()
    assert len(changes.stored) == (20 + NUM_NEW - 1) // BLOCK_SIZE
    assert core.take_cache_changes().stored == []


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"num_blocks": -1}, "num-blocks"),
        ({"num_blocks": 1}, "num-blocks"),
        ({"max_model_len": -1}, "max-model-len"),
        ({"max_model_len": 513}, "max-model-len"),
        ({"block_size": 0}, "block-size"),
        ({"max_num_seqs": 0}, "max-num-seqs"),
        ({"num_blocks": 0, "kv_cache_memory_bytes": 100}, "kv-cache-memory-bytes"),
        ({"dtype": "int3"}, "dtype"),
    ],
)
def test_settings_that_give_no_engine_are_refused(checkpoint: Path, settings: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidSetting, match=name):
        new_engine(checkpoint, **settings)


def test_a_prompt_that_leaves_no_room_for_output_is_refused(checkpoint: Path) -> None:
    core = new_engine(checkpoint, num_blocks=4).core
    with pytest.raises(ContextLengthExceeded):
        core.add(A, Prompt.of(prompt(32)), GREEDY)
    core.add(B, Prompt.of(prompt(31)), GREEDY)
    assert len(run(core)[B]) == 1
