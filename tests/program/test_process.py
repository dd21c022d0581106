from __future__ import annotations

import pytest

from program.process import report_errors
from wire.errors import InvalidSetting


def test_an_error_is_one_line_and_a_status(capsys: pytest.CaptureFixture[str]) -> None:
    def run() -> None:
        raise InvalidSetting("--port 1 is taken")

    assert report_errors(run) == 1
    assert capsys.readouterr().err == "error: --port 1 is taken\n"
