"""Journals of streams: who is forgotten when, and which folders are not used."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from baton.router.http.resume import streams as module
from baton.router.http.resume.logs import Folder, Log, Memory
from baton.router.http.resume.records import StreamHead, pack
from baton.router.http.resume.streams import Kept, Streams
from baton.router.requests.output import Delivery
from baton.wire.errors import InvalidSetting, StreamNotFound
from baton.wire.messages.output import TokenLogprobs

ROOT = Path(__file__).parents[4]
DELIVERY = (1, Delivery((7, 8), (TokenLogprobs(-0.5, (7,), (-0.5,)), TokenLogprobs(-1.0, (8,), (-1.0,))), "stop"))


def head(number: int, body: bytes = b"{}") -> StreamHead:
    return StreamHead(f"cmpl-{number:024x}", "alice", "/v1/completions", "application/json", body, 5, 2**62, b"d" * 16)


def begun(streams: Streams, number: int, body: bytes = b"{}") -> Kept:
    kept = streams.begin(head(number, body))
    assert kept is not None
    return kept


async def is_known(streams: Streams, number: int, owner: str = "alice") -> bool:
    try:
        await streams.find(head(number).stream_id, owner)
    except StreamNotFound:
        return False
    return True


async def until_forgotten(streams: Streams, number: int) -> None:
    async with asyncio.timeout(30):
        while await is_known(streams, number):  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("is_file", [True, False])
async def test_what_was_written_down_is_read_again(tmp_path: Path, is_file: bool) -> None:
    streams = Streams(Folder(tmp_path / "new") if is_file else Memory(), 60.0)
    kept = begun(streams, 1)
    with streams.reading(kept, lambda: None):
        streams.add(kept, [DELIVERY])
        streams.add(kept, [DELIVERY, DELIVERY])
    assert (await streams.find(kept.stream_id, "alice"))[1] == head(1)
    assert (await streams.take_up(kept)).deliveries == [DELIVERY] * 3
    assert not await is_known(streams, 1, "bob")
    streams.close()


async def test_a_stream_is_forgotten_some_time_after_its_connection_ended(tmp_path: Path) -> None:
    streams = Streams(Folder(tmp_path / "new"), 0.02)
    kept = begun(streams, 1)
    with streams.reading(kept, lambda: None):
        await asyncio.sleep(0.05)
        assert await is_known(streams, 1)
    await until_forgotten(streams, 1)
    assert list((tmp_path / "new").glob("*.stream")) == []
    streams.close()


async def test_a_router_takes_over_what_another_one_has_left_unless_it_is_too_old(tmp_path: Path) -> None:
    streams = Streams(Folder(tmp_path / "new"), 60.0)
    old, unfinished, finished = (begun(streams, number) for number in (1, 2, 3))
    finished.has_ended = True
    (tmp_path / "new" / "note.txt").write_text("not a journal")
    streams.close()
    os.utime(tmp_path / "new" / f"{old.stream_id}.stream", times=(time.time() - 61.0,) * 2)
    streams = Streams(Folder(tmp_path / "new"), 60.0)
    assert [await is_known(streams, number) for number in (1, 2, 3)] == [False, True, False]
    found, _ = await streams.find(unfinished.stream_id, "alice")
    streams.add(found, [DELIVERY])
    assert (await streams.take_up(found)).deliveries == [DELIVERY]
    streams.close()


async def test_the_oldest_that_nobody_reads_give_way_to_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 3000)
    streams = Streams(Memory(), 60.0)
    first = begun(streams, 1, b"x" * 900)
    second = begun(streams, 2, b"x" * 900)
    with streams.reading(first, lambda: None):
        begun(streams, 3, b"x" * 900)
        assert [await is_known(streams, number) for number in (1, 2, 3)] == [True, False, True]
        assert second.is_forgotten
        assert streams.begin(head(4, b"x" * 2900)) is None
        assert [await is_known(streams, number) for number in (1, 3)] == [True, False]
        streams.add(first, [DELIVERY] * 200)
    assert first.is_forgotten
    assert {each.name: each.samples[0].value for each in streams.collect()} == {
        "baton:stream_journals": 0,
        "baton:stream_journal_bytes": 0,
        "baton:streams_resumed": 0,
        "baton:streams_without_journal": 2,
    }
    streams.close()


async def test_there_are_no_more_streams_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_STREAMS", 2)
    streams = Streams(Memory(), 60.0)
    for number in (1, 2, 3):
        begun(streams, number)
    assert [await is_known(streams, number) for number in (1, 2, 3)] == [False, True, True]
    streams.close()


async def test_no_file_is_open_of_a_stream_that_nobody_reads(tmp_path: Path) -> None:
    def num_open() -> int:
        links = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        return sum(link.endswith(".stream") and link.startswith(str(tmp_path)) for link in links)

    streams = Streams(Folder(tmp_path / "new"), 60.0)
    kept = begun(streams, 1)
    with streams.reading(kept, lambda: None):
        streams.add(kept, [DELIVERY])
        assert num_open() == 1
    assert num_open() == 0
    with streams.reading(kept, lambda: None):
        streams.add(kept, [DELIVERY])
        streams.close()
        assert num_open() == 0


async def test_a_stream_goes_on_when_its_journal_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = Streams(Folder(tmp_path / "new"), 60.0)
    kept = begun(streams, 1)

    def fail(fd: int, data: bytes) -> int:
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(os, "write", fail)
    with streams.reading(kept, lambda: None):
        streams.add(kept, [DELIVERY])
        streams.add(kept, [DELIVERY])
    assert streams.begin(head(2)) is None
    assert not await is_known(streams, 1)
    assert list((tmp_path / "new").glob("*.stream")) == []
    streams.close()


def test_a_folder_belongs_to_one_router(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "new")
    with pytest.raises(InvalidSetting, match="used by another router"):
        Folder(tmp_path / "new")
    folder.close()
    Folder(tmp_path / "new").close()


def test_a_folder_that_others_may_enter_is_not_used(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(InvalidSetting, match="only its owner"):
        Folder(tmp_path)
    with pytest.raises(InvalidSetting, match="journal-dir"):
        Folder(Path("/proc/no/such"))


def test_a_log_is_not_written_through_a_link(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "new")
    (tmp_path / "new" / "cmpl-1.stream").symlink_to(tmp_path / "other")
    log: Log = folder.create("cmpl-1")
    with pytest.raises(OSError, match="symbolic"):
        log.append(b"x")
    folder.close()


RESUMING = """
import os, sys, threading
from baton.router.http.resume.records import unpack_past

sys.setswitchinterval(1e-6)
data, statuses = bytes.fromhex(sys.argv[1]), set()
for _ in range(40):
    pid = os.fork()
    if not pid:
        together = threading.Barrier(8)
        threads = [threading.Thread(target=lambda: (together.wait(), unpack_past(data))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        os._exit(0)
    statuses.add(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
sys.exit(statuses != {0})
"""


def test_many_streams_that_are_the_first_to_be_resumed_at_once_are_read() -> None:
    """msgspec crashed where several threads were the first to decode a type; one process in six did so."""
    journal = (pack(head(1)) + pack([DELIVERY] * 3) * 5).hex()
    assert subprocess.run([sys.executable, "-c", RESUMING, journal], cwd=ROOT, timeout=60).returncode == 0
