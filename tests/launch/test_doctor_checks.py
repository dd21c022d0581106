from __future__ import annotations

import resource
import shutil
import sys
from pathlib import Path

import pytest

from baton.launch import doctor_checks
from baton.launch.doctor_checks import CHECKS, MIN_SHARED_BYTES, NOTE, OK, Found
from baton.launch.ports import listening


def test_what_is_looked_at_before_torch_does_not_import_it() -> None:
    names = [check.name for check in CHECKS]
    assert names.index("torch") > max(map(names.index, ("python", "memory", "shared memory", "hub", "nixl")))


def test_of_the_processor_only_what_the_kernels_use_is_named(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor : 0\nflags : fpu avx2 fma sse2\nflags : fpu\n")
    assert doctor_checks.find_processor(tmp_path / "cpuinfo").text.endswith(" cores to use; avx2 fma")
    assert "none of the features" in doctor_checks.find_processor(tmp_path / "missing").text


@pytest.mark.parametrize(("free", "state"), [(MIN_SHARED_BYTES, OK), (MIN_SHARED_BYTES - 1, NOTE)])
def test_a_small_shared_memory_is_a_note_with_the_command_that_makes_it_larger(
    free: int, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    found = doctor_checks.find_shared_memory(str(tmp_path))
    assert (found.state, "--shm-size" in found.fix) == (state, state == NOTE)


def test_no_shared_memory_at_all_is_a_note() -> None:
    assert doctor_checks.find_shared_memory("/nowhere").state == NOTE


@pytest.mark.parametrize(("hard", "state"), [(resource.RLIM_INFINITY, OK), (8192, OK), (1024, NOTE)])
def test_few_open_files_are_a_note(hard: int, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (256, hard))
    assert doctor_checks.find_open_files().state == state


def test_a_port_is_free_or_a_note_that_names_the_flag() -> None:
    with listening("127.0.0.1", 0, "--port") as taken:
        assert doctor_checks.find_port(taken.port, "--port").text.endswith("choose another with --port")
    assert doctor_checks.find_port(taken.port, "--port") == Found(OK, "free")


def test_an_extra_that_is_not_installed_is_a_note_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    found = doctor_checks.find_extra("baton_has_no_such", "none", "tests", "pip install 'baton-serve[none]'")
    assert found == Found(NOTE, "not installed, for tests", "pip install 'baton-serve[none]'")


def test_an_extra_whose_own_import_is_missing_is_broken_not_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_installed.py").write_text("import baton_has_no_such")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(ModuleNotFoundError, match="baton_has_no_such"):
        doctor_checks.find_extra("half_installed", "none", "tests", "pip install it")


@pytest.mark.parametrize(("is_offline", "state"), [(True, NOTE), (False, OK)])
def test_the_hub_line_counts_models_and_says_whether_others_can_be_had(
    is_offline: bool, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    (tmp_path / "models--some--model").mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
    found = doctor_checks.find_hub()
    assert found.state == state
    assert found.text.startswith(f"1 models are in {tmp_path}; ")


def test_without_compiled_kernels_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from baton.engine.native import library

    def missing() -> object:
        raise OSError("there was no C++ compiler")

    monkeypatch.setattr(library, "load_library", missing)
    assert doctor_checks.find_kernels().state == NOTE
    assert doctor_checks.find_kernels().text.endswith("no C++ compiler")


def test_gpus_that_torch_does_not_see_are_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    from baton.device import cuda_context

    monkeypatch.setattr(cuda_context, "visible_gpus", list)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert doctor_checks.find_gpus() == Found(OK, "none: models run on the CPU")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert doctor_checks.find_gpus().state == NOTE
    monkeypatch.setattr(cuda_context, "visible_gpus", lambda: [("NVIDIA H100", 80 * 2**30)])
    assert doctor_checks.find_gpus() == Found(OK, "NVIDIA H100, 80 GiB")
