from __future__ import annotations

import ctypes
import logging
import re
from ctypes import CDLL
from pathlib import Path

import pytest
import torch

from baton.engine.native import arguments, expert_arguments, library
from baton.engine.native.library import Kernels, WeightMemory, huge_pages, levels, load_library, open_kernels
from baton.wire.errors import InvalidSetting
from tests.engine.native import compiled
from tests.engine.native.compiled import LEVELS, needs_kernels

SOURCE = Path(library.__file__).parent / "src"
C_TYPES = {"int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "float": ctypes.c_float}


def declared(name: str) -> list[tuple[str, type]]:
    """The fields of a struct of kernels.h."""
    text = re.sub(r"//.*", "", (SOURCE / "kernels.h").read_text())
    found = re.search(rf"struct {name} \{{(.*?)\}};", text, re.DOTALL)
    assert found is not None, name
    fields: list[tuple[str, type]] = []
    for line in found[1].split(";"):
        if not line.strip():
            continue
        kind, names = re.findall(r"^((?:const )?\w+\*?)\s+(.*)$", line.strip(), re.DOTALL)[0]
        for field in names.split(","):
            if kind.endswith("*"):
                fields.append((field.strip(), ctypes.c_void_p))
            else:
                fields.append((field.strip(), C_TYPES.get(kind.strip()) or DECLARED[kind.strip()]))
    return fields


DECLARED = {
    name: value for name, value in (vars(arguments) | vars(expert_arguments)).items() if name.startswith("Baton")
}
STRUCTURES = sorted(DECLARED)


@pytest.mark.parametrize("name", STRUCTURES)
def test_arguments_are_declared_as_the_kernels_declare_them(name: str) -> None:
    assert list(DECLARED[name]._fields_) == declared(name)


def test_every_argument_block_of_the_kernels_is_known() -> None:
    text = (SOURCE / "kernels.h").read_text()
    assert sorted(re.findall(r"struct (\w+) \{", text)) == STRUCTURES
    assert re.findall(r"BATON_INTERFACE = (\d+);", text) == [str(library._INTERFACE)]


@needs_kernels
def test_the_best_level_is_taken_and_any_other_by_its_name() -> None:
    best = open_kernels("auto", 1)
    assert best is not None
    assert best.level == levels(load_library())[0]
    for level in LEVELS:
        chosen = open_kernels(level, 1)
        assert chosen is not None
        assert chosen.level == level
    assert open_kernels("torch", 1) is None
    with pytest.raises(InvalidSetting, match=r"'mmx' is not one of auto, torch, .*baseline"):
        open_kernels("mmx", 1)


def test_without_a_library_torch_computes_and_one_line_says_so(caplog: pytest.LogCaptureFixture) -> None:
    def missing() -> CDLL:
        raise OSError("there was no C++ compiler")

    with caplog.at_level(logging.WARNING):
        assert open_kernels("auto", 1, missing) is None
    assert [record.getMessage() for record in caplog.records] == [
        "CPU kernels: torch's instead of Baton's own, which are faster: there was no C++ compiler"
    ]
    with pytest.raises(InvalidSetting, match="'avx2': there was no C\\+\\+ compiler"):
        open_kernels("avx2", 1, missing)


def test_a_library_of_another_interface_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_INTERFACE", -1)
    with pytest.raises(OSError, match=r"interface \d+, not -1"):
        load_library()


@needs_kernels
@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
def test_every_tile_is_computed_once_whatever_the_threads(num_threads: int) -> None:
    pool = Kernels(compiled.library(), num_threads, LEVELS[0])
    for num_rows in (1, 2, 7, 1000):
        residual, delta = torch.zeros(num_rows, 2048), torch.ones(num_rows, 2048)
        out, weight = torch.empty_like(residual), torch.ones(2048)
        for repeat in range(1, 20):
            add_norm = arguments.BatonAddNorm(
                out.data_ptr(),
                residual.data_ptr(),
                delta.data_ptr(),
                weight.data_ptr(),
                num_rows,
                2048,
                2048,
                2048,
                2048,
                0.0,
                0,
            )
            pool.add_norm(add_norm)
            assert torch.equal(residual, torch.full_like(residual, repeat))
    pool.close()


@pytest.mark.parametrize("num_bytes", [1, 64, 1 << 20, 5 << 20])
def test_memory_for_weights_is_aligned_and_large_enough(num_bytes: int) -> None:
    memory = huge_pages(num_bytes)
    assert (len(memory), memory.data_ptr() % 64) == (num_bytes, 0)
    memory.fill_(1)


def test_memory_for_weights_is_the_systems_again_when_nobody_holds_it() -> None:
    memory = huge_pages(5 << 20)
    memory.fill_(1)
    address = memory.data_ptr()
    assert is_mapped(address)
    part = memory[1 << 20 :][:64]
    del memory
    assert is_mapped(address)
    del part
    assert not is_mapped(address)


def test_small_weights_share_a_region() -> None:
    memory = WeightMemory()
    first, second, large = memory.take(100), memory.take(3 << 20), memory.take(9 << 20)
    assert second.data_ptr() == first.data_ptr() + 128
    for part in (first, second, large):
        part.fill_(1)
    assert [len(part) for part in (first, second, large)] == [100, 3 << 20, 9 << 20]


def is_mapped(address: int) -> bool:
    """Whether this process has memory there."""
    with Path("/proc/self/maps").open() as lines:  # line by line: a large buffer might come to lie there
        for line in lines:
            begin, end = (int(word, 16) for word in line.split(maxsplit=1)[0].split("-"))
            if begin <= address < end:
                return True
    return False


@needs_kernels
def test_a_pool_that_is_closed_leaves_no_thread() -> None:
    tasks = Path("/proc/self/task")
    before = len(list(tasks.iterdir()))
    pool = Kernels(compiled.library(), 5, LEVELS[0])
    assert len(list(tasks.iterdir())) == before + 4
    pool.close()
    assert len(list(tasks.iterdir())) == before
