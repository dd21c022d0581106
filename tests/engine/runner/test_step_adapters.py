"""Which rows of a step are those of adapters."""

from __future__ import annotations

import numpy as np
import torch

from baton.engine.runner.inputs import StepInputs, read_inputs
from baton.engine.runner.step_adapters import StepAdapters
from baton.engine.scheduler.request import ScheduledRequest
from baton.engine.scheduler.step import Step
from baton.wire.prompt import Prompt
from baton.wire.sampling import DecodingParams
from tests.request_keys import key_of


def read(*shares: tuple[bytes, int]) -> tuple[StepInputs, StepInputs]:
    """The inputs of a step with shares of these adapters and numbers of tokens, before and behind the reader."""
    step = Step(
        tuple(
            ScheduledRequest(
                key_of(number),
                0,
                count,
                range(count),
                Prompt.of(range(count), adapter=adapter),
                (0,),
                DecodingParams(),
                False,
            )
            for number, (adapter, count) in enumerate(shares)
        )
    )
    inputs = read_inputs(step, {})
    return inputs, StepAdapters(torch.device("cpu")).read(step, inputs)


def test_a_step_without_adapters_stays_as_it_is() -> None:
    before, behind = read((b"", 3), (b"", 1))
    assert behind is before
    assert behind.is_plain


def test_tokens_beside_each_other_are_a_slice_and_others_are_numbered() -> None:
    before, behind = read((b"", 2), (b"a", 3), (b"a", 1), (b"b", 2), (b"", 1), (b"b", 1))
    (first, beside), (second, apart) = behind.adapted
    assert (first, beside, second) == (b"a", slice(2, 6), b"b")
    assert isinstance(apart, torch.Tensor)
    assert apart.tolist() == [6, 7, 9]
    assert not behind.is_plain
    assert np.array_equal(behind.token_ids, before.token_ids)
