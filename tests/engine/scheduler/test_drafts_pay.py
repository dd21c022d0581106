"""Whole loads on a virtual clock: drafts make copying fast, cost prose nothing, and cease where rows are dear."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import pytest

from baton.engine.cache.block_pool import BlockPool
from baton.engine.core import EngineCore
from baton.engine.runner.base import RunningStep
from baton.engine.scheduler.draft_counts import DraftCounts
from baton.engine.scheduler.draft_depth import DraftDepth
from baton.engine.scheduler.drafts import Speculation
from baton.engine.scheduler.limits import SchedulerLimits
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.step import SampledToken, Step
from baton.engine.scheduler.step_costs import StepCosts
from baton.engine.speculation.settings import chosen_config
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams
from tests.computed_step import ComputedStep
from tests.engine.speculation.text_proposers import proposer_of
from tests.request_keys import key_of

_LENGTH = 120
_END = 0


def steps_of_six_rows(num_rows: int) -> float:
    """As Qwen3-0.6B's shapes on two cores of a CPU: six rows cost hardly more than one, and 64 six times as much."""
    return 0.036 + 0.0007 * min(num_rows, 6) + 0.016 * (max(0, num_rows - 1) // 6)


@dataclass(frozen=True, slots=True)
class Text:
    prompt: Sequence[int]
    output: Sequence[int]
    copies: bool


def copying(chance: random.Random) -> Text:
    """Parts of the prompt, with a word between them that is not in it."""
    prompt, output = [chance.randrange(1, 5000) for _ in range(150)], list[int]()
    while len(output) < _LENGTH:
        start = chance.randrange(110)
        output += [chance.randrange(1, 5000), *prompt[start : start + chance.randrange(10, 40)]]
    return Text(prompt, output[:_LENGTH], copies=True)


def prose(chance: random.Random) -> Text:
    """Pairs of words come again, and what follows them is mostly another."""
    return Text(
        [chance.randrange(1, 40) for _ in range(60)], [chance.randrange(1, 40) for _ in range(_LENGTH)], copies=False
    )


@dataclass(slots=True)
class VirtualRunner:
    """Samples what the texts say; time passes as the rows of a step cost."""

    is_asynchronous = False
    texts: Mapping[RequestKey, Text]
    now_s: float = 0.0
    chance: random.Random = field(default_factory=lambda: random.Random(3))

    def launch(self, step: Step, layer_stored: object = None) -> RunningStep:
        found, num_rows = {}, 0
        for share in step.requests:
            if not share.needs_sample:
                continue
            output, first = self.texts[share.key].output, share.context_len - share.num_drafts - share.prompt.num_tokens
            rows = range(first, first + 1 + share.num_drafts)
            found[share.key] = tuple(SampledToken(output[row] if row < _LENGTH else _END, None) for row in rows)
            num_rows += len(rows)
        self.now_s += steps_of_six_rows(num_rows) * (1 + 0.05 * abs(self.chance.gauss(0, 1)))
        self.now_s += 1e-5 * sum(share.num_tokens for share in step.requests if share.start == 0)
        return ComputedStep(found)


def served(
    texts: Sequence[Text], num_streams: int, *, speculates: bool
) -> tuple[list[tuple[Text, float]], DraftCounts]:
    """Each text with the seconds of its tokens behind the first, where so many are served at once."""
    by_key = {key_of(number): text for number, text in enumerate(texts)}
    runner = VirtualRunner(by_key)
    costs = StepCosts(lambda: runner.now_s)
    costs.learns_rows = True
    proposer = proposer_of(chosen_config("auto" if speculates else "none", is_useful=True))
    speculation = None if proposer is None else Speculation(proposer, DraftDepth(costs))
    pool, limits = BlockPool(3000), SchedulerLimits(16, 64, 512, 1024)
    scheduler = Scheduler(pool, limits, frozenset({_END}), speculation=speculation)
    core = EngineCore(pool, scheduler, runner, "", costs=costs)
    waiting, first_s, last_s = list(by_key), dict[RequestKey, float](), dict[RequestKey, float]()
    while waiting or core.has_work:
        while waiting and len(core.request_keys()) < num_streams:
            key = waiting.pop(0)
            core.add(key, Prompt.of(by_key[key].prompt), DecodingParams(temperature=0.0, max_tokens=_LENGTH))
        for output in core.step():
            if output.tokens:
                first_s.setdefault(output.key, runner.now_s)
                last_s[output.key] = runner.now_s
    core.check()
    return [(by_key[key], last_s[key] - first_s[key]) for key in by_key], scheduler.drafts.counts


def ratio(texts: Sequence[Text], num_streams: int, *, copies: bool) -> float:
    """The median time of a token with drafts, of such texts, to that without."""
    plain, drafted = (served(texts, num_streams, speculates=speculates)[0] for speculates in (False, True))
    of_kind = [median(seconds for text, seconds in found if text.copies == copies) for found in (drafted, plain)]
    return of_kind[0] / of_kind[1]


def mixture(num_each: int) -> list[Text]:
    chance = random.Random(1)
    return [text for _ in range(num_each) for text in (copying(chance), prose(chance))]


def test_one_stream_that_copies_takes_less_than_half_the_time_and_one_that_does_not_pays_nothing() -> None:
    texts = mixture(8)
    assert ratio(texts, 1, copies=True) < 0.45
    assert ratio(texts, 1, copies=False) < 1.02


@pytest.mark.parametrize("num_streams", [4, 16, 32])
def test_streams_that_copy_are_never_slower_together_and_slow_others_by_a_tenth_at_most(num_streams: int) -> None:
    texts = mixture(32)
    assert ratio(texts, num_streams, copies=True) < 1.02
    assert ratio(texts, num_streams, copies=False) < (1.12 if num_streams < 16 else 1.02)


def test_the_more_streams_there_are_the_fewer_tokens_are_drafted() -> None:
    texts = mixture(16)
    drafted = []
    for num_streams in (1, 4, 16):
        methods = served(texts, num_streams, speculates=True)[1].by_method()
        drafted.append(sum(sum(method.tokens_by_position) for method in methods))
    assert drafted == sorted(drafted, reverse=True)
    assert drafted[-1] < 0.4 * drafted[0]
