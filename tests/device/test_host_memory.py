from __future__ import annotations

from pathlib import Path

from baton.device.host_memory import GIB, HostMemory, read_host_memory


def test_without_a_container_the_machine_decides(tmp_path: Path) -> None:
    found = read_host_memory(tmp_path)
    assert 0 < found.free <= found.total
    (tmp_path / "memory.max").write_text("max\n")
    assert read_host_memory(tmp_path).total == found.total


def test_a_containers_limit_counts_and_cached_files_are_free(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{64 * 2**20}\n")
    (tmp_path / "memory.current").write_text(f"{40 * 2**20}\n")
    (tmp_path / "memory.stat").write_text(f"anon 12\ninactive_file {10 * 2**20}\n")
    assert read_host_memory(tmp_path) == HostMemory(64 * 2**20, 34 * 2**20)


def test_a_reading_says_itself_in_gibibytes() -> None:
    assert str(HostMemory(16 * GIB, 3 * GIB // 2)) == "1.5 of 16.0 GiB are free"
