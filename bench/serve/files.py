"""Where a result is written: file names and the line format of `vllm bench serve`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.serve.settings import ServeBenchSettings
from wire.errors import InvalidSetting


def prepare_folder(settings: ServeBenchSettings) -> None:
    """Make the folder of the result, so that a run does not end without a place for it. Raises `InvalidSetting`."""
    if settings.result_dir and (settings.save_result or settings.append_result):
        try:
            Path(settings.result_dir).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidSetting(f"--result-dir {settings.result_dir}: {error.strerror}") from None


def result_path(settings: ServeBenchSettings, result: Mapping[str, Any]) -> Path | None:
    """The file of `result`; None when none is to be written."""
    if not (settings.save_result or settings.append_result):
        return None
    return Path(settings.result_dir) / (settings.result_filename or _default_name(settings, result))


def write_result(path: Path, result: Mapping[str, Any], *, is_appended: bool) -> None:
    """Write `result` to `path`, or append it as one more line. Raises `InvalidSetting`."""
    line = json.dumps(result)
    try:
        if not is_appended:
            path.write_text(line + "\n")
            return
        with path.open("a") as file:
            # a file that vllm has begun ends without a line break
            file.write(line if file.tell() == 0 else "\n" + line)
    except OSError as error:
        raise InvalidSetting(f"--result-filename {path}: {error.strerror}") from None


def _default_name(settings: ServeBenchSettings, result: Mapping[str, Any]) -> str:
    concurrency = "" if settings.max_concurrency is None else f"-concurrency{settings.max_concurrency}"
    if settings.ramp_up_strategy is None:
        rate = f"{settings.request_rate}qps"
    else:
        rate = f"ramp-up-{settings.ramp_up_strategy}-{settings.ramp_up_start_rps}qps-{settings.ramp_up_end_rps}qps"
    model = str(result["model_id"]).rstrip("/").rsplit("/", 1)[-1]
    return f"{result['label']}-{rate}{concurrency}-{model}-{result['date']}.json".replace("/", "_")
