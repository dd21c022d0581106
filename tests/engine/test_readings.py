"""What is read of a prompt's rows comes out of steps with the tokens, or without any, however the prompt is computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from baton.device.base import Array, Device
from baton.engine.core import EngineCore
from baton.engine.scheduler.reading import RowsRead
from baton.engine.scheduler.step import RequestOutput
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams
from tests.checkpoints import make_checkpoint
from tests.engine.mean_reading import MeanOfRows, mean_of
from tests.engine.test_prompt_logprobs import new_engine, prompt, reference, require_equal
from tests.request_keys import A, B, C, key_of

FOUR = DecodingParams(temperature=0, max_tokens=4, ignore_eos=True)
SCORED = DecodingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=3)


@pytest.fixture(scope="module", params=["llama", "gpt2", "gemma2"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / request.param, request.param)
