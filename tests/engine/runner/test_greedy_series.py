"""Steps of a series by recorded calls alone: the tokens are those of steps that are planned anew."""

from __future__ import annotations

from typing import Any

import pytest

from baton.engine.build import Engine, build_engine
from baton.engine.runner.greedy_series import GreedySeries
from baton.engine.runner.kv_memory import allocate_private
from baton.engine.scheduler.step import RequestOutput
from baton.engine.settings import EngineSettings
from baton.wire.grammar import Grammar
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams
from tests.checkpoints import make_checkpoint
from tests.request_keys import A, B, C, key_of

GREEDY = DecodingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = make_checkpoint(tmp_path_factory.mktemp("series") / "llama", "llama")
    settings = EngineSettings(
        str(folder),
        block_size=4,
        num_blocks=96,
        num_threads=1,
        enable_prefix_caching=False,
        speculative_config="none",
    )
    return build_engine(settings, allocate_private)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the steps that a `GreedySeries` computes."""
    numbers: list[int] = []
    launch = GreedySeries.launch

    def noted(series: GreedySeries, step: Any) -> Any:
        found = launch(series, step)
        if found is not None:
            numbers.append(step.number)
        return found

    monkeypatch.setattr(GreedySeries, "launch", noted)
    return numbers


def run(engine: Engine, *, has_series: bool = True) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    while engine.core.has_work:
        if not has_series:
            engine.core._scheduler.requests.num_changes += 1
        outputs += engine.core.step()
        engine.core.check()
    return outputs


def prompt(num_tokens: int) -> list[int]:
    return [(7 * num_tokens + 3 * place) % 290 for place in range(num_tokens)]


@pytest.mark.parametrize("num_requests", [1, 3, 9])
def test_tokens_are_those_of_steps_without_series(engine: Engine, computed: list[int], num_requests: int) -> None:
    found = []
    for has_series in (True, False):
        # of different lengths, so that tables grow in different steps, and some end before others
        for number in range(num_requests):
            params = DecodingParams(temperature=0.0, max_tokens=30 - 2 * (number % 3), ignore_eos=True)
            engine.core.add(key_of(number), Prompt.of(prompt(2 + number)), params)
        found.append((run(engine, has_series=has_series), len(computed)))
    assert found[0][0] == found[1][0]
    # the first step of a series is planned
    assert found[0][1] == found[1][1] > 20


def test_a_request_that_joins_and_one_that_leaves_change_no_tokens(engine: Engine, computed: list[int]) -> None:
    alone = {}
    for key, num_tokens in ((A, 5), (B, 9), (C, 3)):
        engine.core.add(key, Prompt.of(prompt(num_tokens)), GREEDY)
        alone[key] = [token for output in run(engine) for token in output.tokens]
    computed.clear()
    together: dict[RequestKey, list[object]] = {A: [], B: [], C: []}
    events = {0: (A, 5), 7: (B, 9), 15: (C, 3)}
    for number in range(35):
        if number in events:
            key, num_tokens = events[number]
            engine.core.add(key, Prompt.of(prompt(num_tokens)), GREEDY)
        if number == 24:
            engine.core.abort(B)
        for output in engine.core.step():
            together[output.key] += output.tokens
    assert len(computed) > 20
    assert [len(tokens) for tokens in together.values()] == [35, 17, 20]
    assert all(tokens == alone[key][: len(tokens)] for key, tokens in together.items())
    for key in (A, C):
        engine.core.abort(key)


@pytest.mark.parametrize("changes", [{"temperature": 0.7, "seed": 3}, {"logprobs": 2}, {"presence_penalty": 0.5}])
def test_a_row_that_needs_more_than_the_largest_logit_is_computed_as_ever(
    engine: Engine, computed: list[int], changes: dict[str, Any]
) -> None:
    found = []
    for has_series in (True, False):
        engine.core.add(A, Prompt.of(prompt(6)), GREEDY)
        engine.core.add(B, Prompt.of(prompt(4)), DecodingParams(**{"temperature": 0.0, "max_tokens": 9, **changes}))
        engine.core.add(C, Prompt.of(prompt(4)), DecodingParams(temperature=0.0, max_tokens=9))
        found.append(run(engine, has_series=has_series))
    assert found[0] == found[1]
    assert computed  # once the others have left


def test_rows_in_a_grammar_have_the_tokens_of_steps_without_series(engine: Engine, computed: list[int]) -> None:
    asked = (("[a-z ]{9,200}", True), ("([a-d]|\u00e9){5,9}", False), ("", True))
    found = []
    for has_series in (True, False):
        for number, (expression, ignore_eos) in enumerate(asked):
            grammar = Grammar.regex(expression) if expression else None
            params = DecodingParams(temperature=0.0, max_tokens=40, ignore_eos=ignore_eos, grammar=grammar)
            engine.core.add(key_of(number), Prompt.of(prompt(3 + number)), params)
        written: dict[RequestKey, list[object]] = {key_of(number): [] for number in range(len(asked))}
        for output in run(engine, has_series=has_series):  # who has to be compiled first joins later
            written[output.key].append((output.tokens, output.finish_reason))
        found.append(written)
    assert found[0] == found[1]
    assert computed, "some steps are of a series, how many depends on when the grammars are compiled"
    assert len(found[0][key_of(0)]) == 40
    assert 5 <= len(found[0][key_of(1)]) <= 10


def test_a_row_without_a_number_fails_its_request_alone(engine: Engine, computed: list[int]) -> None:
    engine.core.add(A, Prompt.of(prompt(6)), GREEDY)
    engine.core.add(B, Prompt.of(prompt(4)), GREEDY)
    while len(computed) < 3:
        engine.core.step()
    block = engine.core.handoffs.block_table(A)[0]
    engine.memory.blocks[block] = 0xFF
    outputs = {output.key: output for output in engine.core.step()}
    assert outputs[A].has_failed
    assert not outputs[A].tokens
    assert outputs[B].tokens
    assert not engine.core.is_live(A)
    engine.memory.blocks[block] = 0
    engine.core.abort(B)
