from __future__ import annotations

from collections.abc import Callable

import pytest

from baton.runtime.exit_status import report_errors
from baton.wire.errors import BatonError, ChildFailed, InvalidSetting, ModelLoadError, RequestFailed


def raising(error: BaseException) -> Callable[[], None]:
    def run() -> None:
        raise error

    return run


@pytest.mark.parametrize("kind", [InvalidSetting, ModelLoadError])
def test_what_cannot_be_is_status_2(kind: type[BatonError], capsys: pytest.CaptureFixture[str]) -> None:
    assert report_errors(raising(kind("--port 1 is taken"))) == 2
    assert capsys.readouterr().err == "error: --port 1 is taken\n"


@pytest.mark.parametrize("kind", [BatonError, RequestFailed, ChildFailed])
def test_what_fails_while_running_is_status_1(kind: type[BatonError], capsys: pytest.CaptureFixture[str]) -> None:
    assert report_errors(raising(kind("nobody answers"))) == 1
    assert capsys.readouterr().err == "error: nobody answers\n"


def test_ctrl_c_is_status_130(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_errors(raising(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == ""


def test_a_program_that_says_no_status_has_done_its_work() -> None:
    assert report_errors(lambda: None) == 0
    assert report_errors(lambda: 3) == 3
