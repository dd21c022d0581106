"""`baton cache`: what a folder holds, what is damaged in it, and that only Baton's files go."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest

from baton.engine.cache.disk import disk_tier
from baton.launch.cli import main
from baton.testing.kv_stores import BLOCK_BYTES, block_of
from tests.engine.cache.disk.tiers_on_disk import KIND, OTHER_KIND, Opened, files_in


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two blocks of a model and one of another, and somebody's notes."""
    monkeypatch.setattr(disk_tier, "_LINGER_S", 60.0)
    for kind, numbers in ((KIND, (1, 2)), (OTHER_KIND, (3,))):
        with closing(Opened(tmp_path, kind)) as tier:
            for number in numbers:
                tier.put(block_of(number))
    (tmp_path / KIND.digest.hex() / "notes").write_text("precious")
    return tmp_path


def cache_file(folder: Path) -> Path:
    (found,) = (folder / KIND.digest.hex()).glob("*.kv")
    return found


def test_files_are_listed_by_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = cache_file(folder)
    os.utime(file, (file.stat().st_mtime - 7200, file.stat().st_mtime - 7300))
    assert main(["cache", "list", str(folder)]) == 0
    lines = [line.split(maxsplit=4) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["model", "files", "blocks", "MiB", "last used"]
    assert sorted(lines[1:]) == [
        [KIND.digest.hex(), "1", "2", "0.0", "2 hours ago"],
        [OTHER_KIND.digest.hex(), "1", "1", "0.0", "now"],
    ]


def test_verifying_reads_all_and_changes_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = [(file, file.stat().st_mtime_ns, file.stat().st_mode) for file in files_in(folder)]
    assert main(["cache", "verify", str(folder)]) == 0
    assert capsys.readouterr().out == "2 files, 0 damaged\n"
    assert [(file, file.stat().st_mtime_ns, file.stat().st_mode) for file in files_in(folder)] == before


def test_verifying_names_damaged_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = cache_file(folder)
    content = bytearray(file.read_bytes())
    content[-BLOCK_BYTES // 2] ^= 1
    file.write_bytes(content)
    assert main(["cache", "verify", str(folder)]) == 1
    assert capsys.readouterr().out == f"{file}: block 1 has wrong bytes\n2 files, 1 damaged\n"
    file.write_bytes(content[:-1])
    assert main(["cache", "verify", str(folder)]) == 1
    assert "bytes, not" in capsys.readouterr().out
    os.replace(next((folder / OTHER_KIND.digest.hex()).glob("*.kv")), file)
    assert main(["cache", "verify", str(folder)]) == 1
    assert "of another model" in capsys.readouterr().out


def test_emptying_deletes_our_files_only(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / ("ab" * 16)).mkdir(0o700)
    (folder / ("ab" * 16) / ".0123456789abcdef-1.kv").touch()  # of a node that was killed
    assert main(["cache", "empty", str(folder)]) == 0
    assert capsys.readouterr().out.startswith("deleted 2 files, ")
    assert [file.name for file in files_in(folder)] == ["notes"]
    assert [each.name for each in folder.iterdir()] == [KIND.digest.hex()]
    assert main(["cache", "list", str(folder)]) == 0


def test_a_folder_that_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "list", str(tmp_path / "missing")]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path / 'missing'} cannot be used: No such file or directory\n"
