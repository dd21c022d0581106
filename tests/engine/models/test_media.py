"""A second kind of medium through the whole engine: the tower that computes it is all that has to know it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import baton.engine.model_shard
from baton.device.base import Array
from baton.engine.build import Engine
from baton.wire.errors import InvalidRequest
from baton.wire.media import Medium
from baton.wire.prompt import Prompt
from baton.wire.sampling import DecodingParams
from tests.engine.models.image_files import picture
from tests.engine.models.seeing import Seeing, make_seeing
from tests.engine.models.test_families import built
from tests.engine.models.test_images import Composed
from tests.request_keys import key_of
from tests.wire.tone import Tone, tone

TONE_ID = 5
NUM_OUTPUT = 6


class ToneFacts:
    """A tone stands in a prompt as `TONE_ID` for each sample, and has positions like text."""

    token_id = TONE_ID

    def __init__(self, sections: Sequence[int]) -> None:
        self.sections = sections

    def coordinates(self, medium: Tone, places: Array) -> Sequence[Array]:
        return (places, places, places)

    def num_positions(self, medium: Tone) -> int:
        return medium.num_tokens

    def require_fit(self, token_ids: Sequence[int], medium: Tone) -> None:
        if set(token_ids[medium.start : medium.stop]) != {TONE_ID}:
            raise InvalidRequest("the tokens of a tone are those of something else", "messages")


class ToneTower:
    """The row of a sample is the embedding of the token with that id."""

    num_bytes = 0

    def __init__(self, seeing: Seeing) -> None:
        self.facts = ToneFacts(seeing.facts.sections)
        self._embeddings: Tensor = seeing.model.get_input_embeddings().weight.detach()

    def rows(self, medium: Tone, hash_root: bytes) -> Tensor:
        samples = torch.from_numpy(np.frombuffer(medium.payload, dtype="<u2").astype(np.int64))
        return self._embeddings[samples][None]


@pytest.fixture(params=["mistral3", "qwen2.5-vl"])
def seeing(request: pytest.FixtureRequest, tmp_path: Path) -> Seeing:
    return make_seeing(tmp_path, request.param)


@pytest.fixture
def engine(seeing: Seeing, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Of a model that sees, and hears tones."""
    of_images = baton.engine.model_shard.towers_of
    hearing = {"tone": ToneTower(seeing)}
    monkeypatch.setattr(baton.engine.model_shard, "towers_of", lambda *given: {**of_images(*given), **hearing})
    return built(seeing.folder, num_blocks=128)


def answer(engine: Engine, ids: Sequence[int], media: Sequence[Medium]) -> tuple[list[int], list[float]]:
    """The tokens that greedy sampling gives, and their log probabilities."""
    params = DecodingParams(temperature=0.0, max_tokens=NUM_OUTPUT, logprobs=0)
    engine.core.add(key_of(1), Prompt.of(ids, media=media), params)
    tokens = []
    while engine.core.has_work:
        tokens += [token for output in engine.core.step() for token in output.tokens]
    return [token.token_id for token in tokens], [token.logprobs.logprob for token in tokens if token.logprobs]


def test_each_medium_is_computed_by_the_tower_of_its_kind(seeing: Seeing, engine: Engine) -> None:
    samples = list(range(40, 51))  # chunks of 8 tokens begin and end within it
    seen, behind = Composed(seeing).text(5, 1).image(picture(100, 60, 1)), Composed(seeing).text(4, 2).ids
    ids = [*seen.ids, *[TONE_ID] * len(samples), *behind]
    assert engine.core.media_kinds == ("image", "tone")
    tokens, logprobs = answer(engine, ids, [*seen.images, tone(len(seen.ids), samples)])
    assert len(tokens) == NUM_OUTPUT
    as_text = answer(engine, [*seen.ids, *samples, *behind], seen.images)
    assert tokens == as_text[0]
    assert logprobs == pytest.approx(as_text[1], abs=1e-4)
    assert logprobs != pytest.approx(answer(engine, ids, seen.images)[1], abs=1e-4)


def test_a_medium_that_nothing_computes_or_whose_tokens_are_others_is_refused(seeing: Seeing, engine: Engine) -> None:
    ids, medium = [1, 2, TONE_ID, TONE_ID, 3], tone(2, [7, 8])
    with pytest.raises(InvalidRequest, match="are those of something else"):
        engine.core.add(key_of(1), Prompt.of([*ids[:3], 9, 3], media=[medium]), DecodingParams())
    with pytest.raises(InvalidRequest, match="without its payload"):
        engine.core.add(key_of(1), Prompt.of(ids, media=[medium.without_payload()]), DecodingParams())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(baton.engine.model_shard, "towers_of", lambda *given: {})
        deaf = built(seeing.folder)
    with pytest.raises(InvalidRequest, match="takes no tone input"):
        deaf.core.add(key_of(1), Prompt.of(ids, media=[medium]), DecodingParams())
