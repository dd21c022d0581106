"""An engine that nobody gives ranks has one."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.engine.build import build_engine
from baton.engine.runner.kv_memory import allocate_private
from baton.engine.settings import EngineSettings
from baton.wire.errors import InvalidSetting
from tests.checkpoints import make_checkpoint


@pytest.mark.parametrize("size", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_settings_of_several_ranks_are_refused_where_nobody_opens_them(tmp_path: Path, size: str) -> None:
    make_checkpoint(tmp_path, "llama")
    settings = EngineSettings(str(tmp_path), num_threads=1, **{size: 2})  # type: ignore[arg-type]
    with pytest.raises(InvalidSetting, match=r"^2 ranks: this program computes with one$"):
        build_engine(settings, allocate_private)
