"""What is read of a prompt's rows comes out of steps beside tokens, or without any, however the prompt is computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.device.base import Array, Device
from baton.engine.core import EngineCore
from baton.engine.runner.prompt_scoring import PromptScoring
from baton.engine.scheduler.reading import RowsRead
from baton.engine.scheduler.step import RequestOutput
from baton.wire.prompt import Prompt
from baton.wire.prompt_logprobs import read_rows
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams
from tests.checkpoints import make_checkpoint
from tests.engine.mean_reading import MeanOfRows, mean_of
from tests.engine.test_prompt_logprobs import new_engine, prompt, reference, require_equal
from tests.request_keys import A, B, C, key_of

PLAIN = DecodingParams(temperature=0, max_tokens=4, ignore_eos=True)
TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class LastRow(MeanOfRows):
    """Of the last row alone."""

    def rows(self, num_prompt_tokens: int) -> range:
        """See `Reading.rows`."""
        return range(num_prompt_tokens - 1, num_prompt_tokens)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "qwen3", "qwen3")


@pytest.fixture
def devices() -> Iterator[list[Device]]:
    """Those of the engines that a test makes, closed at its end."""
    found: list[Device] = []
    yield found
    for device in found:
        device.close()


class Driven:
    """All that an engine told, step by step. Fails when a row is told twice or left out."""

    def __init__(self, core: EngineCore, max_steps: int = 400) -> None:
        self.outputs: list[RequestOutput] = []
        for _ in range(max_steps):
            if not core.has_work:
                return
            self.outputs += core.step()
            core.check()
        raise AssertionError("the engine did not finish")

    def of(self, key: RequestKey) -> list[RequestOutput]:
        return [output for output in self.outputs if output.key == key]

    def tokens(self, key: RequestKey) -> list[int]:
        return [token_id for output in self.of(key) for token_id in output.token_ids]

    def parts(self, key: RequestKey, rows: range) -> list[RowsRead]:
        found = [output.read for output in self.of(key) if output.read is not None]
        assert [row for part in found for row in range(part.first_row, part.first_row + part.num_rows)] == list(rows)
        assert all(part.is_valid for part in found)
        return found


def states(folder: Path, token_ids: list[int]) -> Array:
    """The last hidden states [T, E] in transformers."""
    with torch.inference_mode():
        found: Array = reference(folder).base_model(torch.tensor([token_ids])).last_hidden_state[0].numpy()
    return found


def require_mean(driven: Driven, key: RequestKey, folder: Path, token_ids: list[int]) -> None:
    expected = states(folder, token_ids).mean(0)
    assert mean_of(driven.parts(key, range(len(token_ids)))) == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize("settings", [{}, {"model_impl": "transformers"}, {"device": "emulated"}], ids=str)
@pytest.mark.parametrize("budget", [7, 512])
def test_a_mean_of_hidden_states_is_that_of_transformers_and_samples_nothing(
    checkpoint: Path, devices: list[Device], budget: int, settings: dict[str, Any]
) -> None:
    engine = new_engine(checkpoint, max_num_batched_tokens=budget, **settings)
    devices.append(engine.device)
    prompts = {key_of(length): prompt(length) for length in (1, 2, 7, 8, 29, 50)}
    for key, token_ids in prompts.items():
        engine.core.add(key, Prompt.of(token_ids), DecodingParams(), reading=MeanOfRows())
    engine.core.add(key_of("plain"), Prompt.of(prompt(33)), PLAIN)
    driven = Driven(engine.core)
    for key, token_ids in prompts.items():
        require_mean(driven, key, checkpoint, token_ids)
        assert driven.tokens(key) == []
        *others, last = driven.of(key)
        assert (last.has_left, last.finish_reason, last.has_failed) == (True, "", False)
        assert not any(output.has_left for output in others)
    assert len(driven.tokens(key_of("plain"))) == 4


def test_rows_that_are_read_are_computed_again_where_the_prompt_is_cached(checkpoint: Path) -> None:
    core = new_engine(checkpoint, max_num_batched_tokens=16).core
    core.add(A, Prompt.of(prompt(50)), PLAIN)
    Driven(core)
    core.add(A, Prompt.of(prompt(50)), PLAIN, reading=MeanOfRows())
    core.add(B, Prompt.of(prompt(50)), PLAIN, reading=LastRow())
    driven = Driven(core)
    require_mean(driven, A, checkpoint, prompt(50))
    assert driven.of(A)[-1].num_cached_tokens == 0
    last = mean_of(driven.parts(B, range(49, 50)))
    assert last == pytest.approx(states(checkpoint, prompt(50))[-1], abs=TOLERANCE)
    assert driven.of(B)[-1].num_cached_tokens == 48


def test_kinds_stand_beside_each_other_in_a_step_that_is_full(checkpoint: Path) -> None:
    core = new_engine(checkpoint, max_num_batched_tokens=64, max_num_seqs=4).core
    core.add(A, Prompt.of(prompt(20)), PLAIN, reading=MeanOfRows(with_tokens=True))
    core.add(B, Prompt.of(prompt(13)), PLAIN, reading=PromptScoring(3))
    core.add(C, Prompt.of(prompt(31)), PLAIN, reading=LastRow())
    driven = Driven(core)
    require_mean(driven, A, checkpoint, prompt(20))
    (scored,) = driven.parts(B, range(12))
    require_equal(list(read_rows(scored.values, scored.num_rows)), checkpoint, prompt(13))
    assert mean_of(driven.parts(C, range(30, 31))) == pytest.approx(states(checkpoint, prompt(31))[-1], abs=TOLERANCE)
    core.add(C, Prompt.of(prompt(20)), PLAIN)
    assert driven.tokens(A) == Driven(core).tokens(C)


def test_a_prompt_that_is_computed_again_is_read_once(checkpoint: Path) -> None:
    core = new_engine(checkpoint, num_blocks=9, max_num_batched_tokens=5, max_num_seqs=8).core
    longer = DecodingParams(temperature=0, max_tokens=20, ignore_eos=True)
    for number in range(5):
        reading = MeanOfRows(with_tokens=number % 2 == 0)
        core.add(key_of(number), Prompt.of(prompt(14, seed=number)), longer, reading=reading)
    driven = Driven(core)
    assert core.status().num_preemptions > 0
    for number in range(5):
        require_mean(driven, key_of(number), checkpoint, prompt(14, seed=number))


def test_what_is_aborted_while_its_last_step_is_in_flight_tells_nothing(
    checkpoint: Path, devices: list[Device]
) -> None:
    engine = new_engine(checkpoint, device="emulated", max_num_batched_tokens=8)
    devices.append(engine.device)
    core = engine.core
    core.add(A, Prompt.of(prompt(16)), PLAIN, reading=MeanOfRows())
    (first,) = core.step()
    assert (first.read, core.num_steps_in_flight) == (RowsRead(0, 8, first.read.values if first.read else b"", True), 1)
    assert core.abort(A)
    assert Driven(core).outputs == []
    assert core.status().num_running == 0
