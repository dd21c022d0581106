"""What is said about blocks: the same events as vLLM's, of the blocks that anybody may know."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec

from baton.engine.cache.block_log import PublishedRun
from baton.engine.cache.block_pool import CacheChanges
from baton.node.kv_events.events import AllBlocksCleared, Event, EventBatch, PoolEvents
from baton.wire.images import PromptImage, digest_of
from baton.wire.prompt import Prompt
from tests.node.kv_events.reader import Block, View

RECORDED = json.loads(Path(__file__).with_name("vllm_0_32.json").read_text())
SIZE = 4
PLAIN = Prompt.of(range(100, 120))


def hash_of(number: int) -> bytes:
    return b"\xff" * 8 + number.to_bytes(8, "big")


def run_of(first: int, count: int, prompt: Prompt = PLAIN, hash_base: int = 0) -> PublishedRun:
    """Blocks `first` and behind of the sequence of `prompt`."""
    hashes = [hash_of(hash_base + first + number) for number in range(count)]
    parent = hash_of(hash_base + first - 1) if first else None
    return PublishedRun(prompt, first, parent, hashes, prompt.token_ids[first * SIZE : (first + count) * SIZE])


def told(events: PoolEvents, *runs: PublishedRun, removed: Sequence[bytes] = ()) -> list[Event]:
    """The events after these runs were published, all of whose blocks were new."""
    for run in runs:
        events.published(run)
    return events.changed(CacheChanges([each for run in runs for each in run.hashes], list(removed)))


def payload_of(*events: Event) -> bytes:
    return msgspec.msgpack.encode(EventBatch(1.0, events))


def test_recorded_frames_of_vllm_are_read_to_the_end() -> None:
    view, sizes = View(), []
    for number, frames in enumerate(RECORDED["published"]):
        topic, number_bytes, payload = map(bytes.fromhex, frames)
        assert (topic, int.from_bytes(number_bytes, "big")) == (b"kv@pod@model", number)
        view.apply(payload)
        sizes.append(len(view.blocks))
    assert sizes == [2, 3, 5, 6, 9, 10, 10, 1]  # at last its cache is cleared, and one block stored
    replayed = [[*map(bytes.fromhex, frames)] for frames in RECORDED["replayed"]]
    assert [frames[1:] for frames in replayed[:-1]] == [
        [*map(bytes.fromhex, frames)] for frames in RECORDED["published"][1:]
    ]
    assert replayed[-1] == [b"", b"", b"\xff" * 8, b""]


def test_our_events_have_the_fields_and_types_of_vllms() -> None:
    (theirs,) = msgspec.msgpack.decode(bytes.fromhex(RECORDED["published"][1][2]))[1]
    events = PoolEvents(SIZE, {})
    ours, removed = msgspec.msgpack.decode(
        payload_of(*told(events, run_of(1, 1)), *told(events, removed=[hash_of(1)]))
    )[1]
    assert list(ours) == [name for name in theirs if name not in ("extra_keys", "group_idx", "kv_cache_spec_kind")]
    assert {name: type(value) for name, value in ours.items()} == {name: type(theirs[name]) for name in ours}
    assert removed == {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"}
    assert msgspec.msgpack.decode(payload_of(AllBlocksCleared())) == [1.0, [{"type": "AllBlocksCleared"}], 0]


def test_a_reader_knows_tokens_and_parents_of_what_is_stored() -> None:
    view, events = View(), PoolEvents(SIZE, {})
    view.apply(payload_of(*told(events, run_of(0, 3))))
    view.apply(payload_of(*told(events, run_of(3, 1))))
    assert view.blocks == {
        number: Block(number - 1 if number else None, PLAIN.token_ids[number * SIZE : (number + 1) * SIZE])
        for number in range(4)
    }
    view.apply(payload_of(*told(events, removed=[hash_of(1), hash_of(3)])))
    assert set(view.blocks) == {0, 2}
    assert (events.counters.num_stored, events.counters.num_removed) == (4, 2)


def test_only_what_has_become_findable_is_told_of() -> None:
    events = PoolEvents(SIZE, {})
    events.published(run_of(0, 5))
    stored = [hash_of(1), hash_of(2), hash_of(4)]  # another request had the others, or they are gone again
    view = View()
    view.apply(payload_of(*events.changed(CacheChanges(stored, []))))
    assert {number: block.parent for number, block in view.blocks.items()} == {1: 0, 2: 1, 4: 3}
    assert events.changed(CacheChanges([hash_of(3)], [])) == []  # what was published then is forgotten
    events.published(run_of(0, 1))
    assert events.changed(CacheChanges([], [hash_of(0)])) == []  # of which nobody was told


def test_a_block_that_is_published_twice_is_told_of_once() -> None:
    events = PoolEvents(SIZE, {})
    events.published(run_of(0, 1))
    assert len(told(events, run_of(0, 1))) == 1
    assert events.counters.num_stored == 1


def test_blocks_of_a_prompt_with_a_salt_are_nobodys_business() -> None:
    events = PoolEvents(SIZE, {})
    private = run_of(0, 3, Prompt.of(PLAIN.token_ids, b"salt of a tenant"), hash_base=50)
    stored = told(events, private, run_of(0, 1))
    assert [each.block_hashes for each in stored if not isinstance(each, AllBlocksCleared)] == [[0]]
    assert told(events, removed=private.hashes) == []
    assert events.counters.num_private == 3


def test_media_of_a_block_are_its_extra_keys_with_their_place_in_it() -> None:
    pixels = bytes(range(3 * 4)), bytes(3 * 4), bytes(range(1, 13))
    images = [
        PromptImage(place, 4, digest_of(2, 2, each), each, 2, 2) for place, each in zip((2, 6, 12), pixels, strict=True)
    ]
    run = run_of(0, 5, Prompt.of(PLAIN.token_ids, media=images))
    view = View()
    view.apply(payload_of(*told(PoolEvents(SIZE, {}), run)))
    first, second, third = (image.digest.hex() for image in images)
    assert [view.blocks[number].extra_keys for number in range(5)] == [
        [[first, 2]],
        [[first, -2], [second, 2]],
        [[second, -2]],
        [[third, 0]],
        None,
    ]


def test_an_adapter_is_named_and_one_without_a_name_is_not_told_of() -> None:
    events = PoolEvents(SIZE, {b"a" * 16: "legal"})
    named, unknown = (Prompt.of(PLAIN.token_ids, adapter=each * 16) for each in (b"a", b"b"))
    (event,) = told(events, run_of(0, 1, named), run_of(0, 1, unknown, hash_base=9))
    assert msgspec.to_builtins(event)["lora_name"] == "legal"
