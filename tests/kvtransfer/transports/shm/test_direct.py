"""Pools in shared memory: whose names lead where, and what is written."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from baton.kvtransfer.messages import Endpoint
from baton.kvtransfer.transports.base import Blocks, Move
from baton.kvtransfer.transports.shm import segment as shm_segment
from baton.kvtransfer.transports.shm.direct import ShmReceiver, ShmSender
from baton.kvtransfer.transports.shm.segment import Mapping, Segment, sweep_orphans
from baton.kvtransfer.write_proof import WriteProof
from baton.wire.errors import TransferFailed
from tests.request_keys import key_of

_FOLDER = Path("/dev/shm")
BLOCK_BYTES = 128
_HOLD_SEGMENT = """
import time
from baton.kvtransfer.transports.shm.segment import Segment
print(Segment(4096).name, flush=True)
time.sleep(60)
"""


@pytest.fixture
def segment() -> Iterator[Segment]:
    segment = Segment(8 * BLOCK_BYTES)
    yield segment
    segment.close()


@pytest.fixture
def source() -> Blocks:
    return np.zeros((4, BLOCK_BYTES), dtype=np.uint8)


def test_names_are_random_and_only_the_owner_may_open_them(segment: Segment) -> None:
    other = Segment(4096)
    try:
        assert other.name != segment.name
        assert stat.S_IMODE(os.stat(_FOLDER / segment.name).st_mode) == 0o600
    finally:
        other.close()


def test_the_name_is_gone_after_close(segment: Segment) -> None:
    ShmReceiver(segment).close()
    assert not (_FOLDER / segment.name).exists()


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../etc/passwd", "baton-xyz", "sem.other", f"baton-{'0' * 31}/"])
def test_names_that_are_not_segments_are_refused(name: str, source: Blocks) -> None:
    with pytest.raises(TransferFailed, match="not a segment"):
        ShmSender(Endpoint("shm", name), source, 8)


def test_links_are_not_followed(tmp_path: Path, planted: Path, source: Blocks) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(bytes(8 * BLOCK_BYTES))
    planted.symlink_to(victim)
    with pytest.raises(TransferFailed, match="cannot be mapped"):
        ShmSender(Endpoint("shm", planted.name), source, 8)
    sweep_orphans()
    assert victim.exists()


@pytest.mark.parametrize("num_blocks", [0, 7, 9, 2**40])
def test_a_segment_of_another_size_is_refused(segment: Segment, source: Blocks, num_blocks: int) -> None:
    with pytest.raises(TransferFailed, match="has 1024 bytes, not"):
        ShmSender(Endpoint("shm", segment.name), source, num_blocks)


def test_an_empty_segment_is_refused(planted: Path, source: Blocks) -> None:
    planted.touch(0o600)
    with pytest.raises(TransferFailed, match="cannot be mapped"):
        ShmSender(Endpoint("shm", planted.name), source, 0)


def test_a_segment_that_was_cut_off_after_it_was_mapped_is_not_touched(segment: Segment, source: Blocks) -> None:
    sender = ShmSender(Endpoint("shm", segment.name), source, 8)
    os.truncate(_FOLDER / segment.name, 0)  # touching what is gone ends the process
    with pytest.raises(TransferFailed, match="has 0 bytes, not 1024"):
        sender.push(key_of(1), [Move(0, 0, 7, 1)])
    with pytest.raises(TransferFailed, match="has 0 bytes, not 1024"):
        sender.push_part(key_of(1), [Move(0, 0, 7, 1)], 0, 64)
    sender.close()


def test_nothing_is_written_into_holes_of_a_segment(source: Blocks) -> None:
    segment = Segment(64 * BLOCK_BYTES, 4096)  # where there is no memory, a write to the rest would end the process
    sender = ShmSender(Endpoint("shm", segment.name), source, 64)
    num_reserved = 4096 // BLOCK_BYTES
    assert sender.push(key_of(1), [Move(0, 0, num_reserved - 1, 1)])
    with pytest.raises(TransferFailed, match="has holes"):
        sender.push(key_of(1), [Move(0, 0, 0, 1), Move(1, 1, num_reserved, 1)])
    with pytest.raises(TransferFailed, match="has holes"):
        sender.push_part(key_of(1), [Move(0, 0, num_reserved, 1)], 0, 64)
    sender.close()
    segment.close()


@pytest.mark.parametrize("kind", ["fifo", "of another user"])
def test_what_is_no_file_of_this_user_is_refused(
    planted: Path, source: Blocks, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    if kind == "fifo":
        os.mkfifo(planted)
    else:
        planted.write_bytes(bytes(8 * BLOCK_BYTES))
        monkeypatch.setattr(os, "geteuid", lambda: os.stat(planted).st_uid + 1)
    with pytest.raises(TransferFailed, match="not a segment of this user"):
        ShmSender(Endpoint("shm", planted.name), source, 8)


def test_a_segment_that_is_gone_is_refused(segment: Segment, source: Blocks) -> None:
    segment.close()
    with pytest.raises(TransferFailed, match="cannot be mapped"):
        ShmSender(Endpoint("shm", segment.name), source, 8)


def test_blocks_beyond_the_pool_are_not_written(segment: Segment, source: Blocks) -> None:
    sender = ShmSender(Endpoint("shm", segment.name), source, 8)
    with pytest.raises(ValueError, match="broadcast"):
        sender.push(key_of(1), [Move(0, 0, 7, 1), Move(1, 1, 8, 1)])


def test_too_little_shared_memory_is_an_error_at_creation(monkeypatch: pytest.MonkeyPatch) -> None:
    number = secrets.token_hex(16)
    monkeypatch.setattr(secrets, "token_hex", lambda num_bytes: number)
    with pytest.raises(OSError, match=r"space|large"):
        Segment(2**50)
    assert not (_FOLDER / f"baton-{number}").exists()


def test_the_segment_of_a_killed_process_is_swept_and_of_a_living_one_kept(segment: Segment) -> None:
    with subprocess.Popen([sys.executable, "-c", _HOLD_SEGMENT], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        name = owner.stdout.readline().strip()
        sweep_orphans()
        assert (_FOLDER / name).exists()
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    sweep_orphans()
    assert not (_FOLDER / name).exists()
    assert (_FOLDER / segment.name).exists()


def test_a_segment_swept_between_creation_and_lock_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter(["a" * 32, "b" * 32])
    real_open = os.open

    def open_and_sweep(path: Path, flags: int, mode: int = 0o777) -> int:
        descriptor = real_open(path, flags, mode)
        if path.name.endswith("a" * 32):
            path.unlink()
        return descriptor

    monkeypatch.setattr(secrets, "token_hex", lambda num_bytes: next(names))
    monkeypatch.setattr(os, "open", open_and_sweep)
    segment = Segment(4096)
    try:
        assert segment.name == f"baton-{'b' * 32}"
        assert (_FOLDER / segment.name).exists()
    finally:
        segment.close()


def test_files_of_others_are_not_swept(planted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted.touch(0o600)
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(planted).st_uid + 1)
    assert sweep_orphans() == 0
    assert planted.exists()


def test_parts_of_blocks_are_written_where_they_belong(segment: Segment, source: Blocks) -> None:
    blocks = segment.array.reshape(8, BLOCK_BYTES)
    blocks[:] = 0xA5
    source[:] = np.arange(BLOCK_BYTES, dtype=np.uint8)
    ShmSender(Endpoint("shm", segment.name), source, 8).push_part(
        key_of(1), [Move(0, 1, 6, 1), Move(1, 2, 7, 1), Move(2, 0, 0, 1)], 32, 96
    )
    written = np.full((8, BLOCK_BYTES), 0xA5, dtype=np.uint8)
    written[[6, 7, 0], 32:96] = np.arange(32, 96, dtype=np.uint8)
    assert (blocks == written).all()


def test_what_cannot_be_swept_keeps_nobody_from_sweeping_the_rest(
    segment: Segment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orphans = [tmp_path / f"baton-{number:032x}" for number in range(4)]
    strange, link, others = tmp_path / "baton-strange", tmp_path / f"baton-{9:032x}", tmp_path / f"baton-{8:032x}"
    for path in (*orphans, strange, others):
        path.touch()
    link.symlink_to(strange)
    real_fstat = os.fstat

    def fstat(descriptor: int) -> os.stat_result:
        found = real_fstat(descriptor)
        if found.st_ino != others.stat().st_ino:
            return found
        return os.stat_result([value + (place == 4) for place, value in enumerate(found[:10])])  # another st_uid

    living = _FOLDER / segment.name
    order = [strange, orphans[0], link, orphans[1], others, orphans[2], living, orphans[3]]
    monkeypatch.setattr(shm_segment, "FOLDER", SimpleNamespace(glob=lambda pattern: order))
    monkeypatch.setattr(os, "fstat", fstat)
    assert sweep_orphans() == 4
    assert [path.name for path in order if os.path.lexists(path)] == [
        path.name for path in (strange, link, others, living)
    ]


def test_a_sweep_that_the_system_refuses_is_an_error_and_leaves_no_file_open(
    planted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    planted.touch(0o600)
    num_open = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OSError, match="No locks"):
        sweep_orphans()
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_neither_end_has_anything_to_wait_for(segment: Segment, source: Blocks) -> None:
    receiver, sender = ShmReceiver(segment), ShmSender(Endpoint("shm", segment.name), source, 8)
    assert (receiver.endpoint, receiver.is_ready, receiver.is_silent) == (Endpoint("shm", segment.name), True, True)
    assert receiver.write_proof is WriteProof.WRITER_ENDED
    assert (receiver.wait_on(), receiver.take_arrivals(), sender.wait_on()) == ((), (), ())
    assert (receiver.is_writing(key_of(1)), receiver.fence(), sender.is_reading(key_of(1))) == (False, False, False)
    assert (sender.is_silent, sender.pushes_parts, sender.needs_fence, sender.writers) == (True, True, False, ())
    assert sender.push(key_of(1), [Move(0, 1, 6, 1)])
    assert (segment.array.reshape(8, BLOCK_BYTES)[6] == source[1]).all()
    sender.close()
    with pytest.raises(TransferFailed):
        ShmSender(Endpoint("shm", segment.name), source, 9)


def test_a_mapping_that_is_closed_twice_closes_no_file_of_others(segment: Segment) -> None:
    mapping = Mapping(segment.name, 8 * BLOCK_BYTES)
    mapping.close()
    assert mapping.array.size == 0
    other = os.open("/dev/null", os.O_RDONLY)
    try:
        mapping.close()
        assert os.fstat(other)
    finally:
        os.close(other)
