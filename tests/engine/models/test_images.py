"""Prompts with images through the whole engine, compared with transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from baton.engine.build import Engine
from baton.engine.handoffs import FirstToken
from baton.engine.models.vision.decoding import resized
from baton.engine.models.vision.tower import Tower
from baton.engine.scheduler.step import RequestOutput
from baton.node.events import failure_of
from baton.wire.errors import BatonError, InvalidRequest, Overloaded
from baton.wire.images import PromptImage, digest_of
from baton.wire.prompt import Prompt
from baton.wire.sampling import DecodingParams
from tests.engine.models.image_files import picture
from tests.engine.models.seeing import SEEING_FAMILIES, Seeing, make_seeing
from tests.engine.models.test_families import NUM_OUTPUT, Answer, built
from tests.request_keys import key_of


class Composed:
    """Token ids with images among them, put together piece by piece."""

    def __init__(self, seeing: Seeing) -> None:
        self.ids: list[int] = []
        self.images: list[PromptImage] = []
        self.pictures: list[Image.Image] = []
        self._facts = seeing.facts

    def text(self, count: int, seed: int) -> Composed:
        """Some tokens of text."""
        self.ids += torch.randint(0, 300, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
        return self

    def image(self, image: Image.Image) -> Composed:
        """An image."""
        found = resized(image, self._facts)
        ids = self._facts.token_ids(found.height, found.width)
        digest = digest_of(found.height, found.width, found.pixels)
        self.images.append(PromptImage(len(self.ids), len(ids), digest, found.pixels, found.height, found.width))
        self.ids += ids
        self.pictures.append(image)
        return self


def ask(engine: Engine, *prompts: Composed) -> list[Answer]:
    """What greedy sampling gives for the prompts together."""
    found = {key_of(number): Answer(prompt.ids) for number, prompt in enumerate(prompts)}
    params = DecodingParams(temperature=0.0, max_tokens=NUM_OUTPUT, logprobs=3)
    for key, prompt in zip(found, prompts, strict=True):
        engine.core.add(key, Prompt.of(prompt.ids, media=prompt.images), params)
    while engine.core.has_work:
        for output in engine.core.step():
            assert not output.has_failed, output.failure
            answer = found[output.key]
            answer.tokens += output.tokens
            answer.num_cached = max(answer.num_cached, output.num_cached_tokens)
    engine.core.check()
    return list(found.values())


@torch.inference_mode()
def assert_same(seeing: Seeing, prompt: Composed, answer: Answer) -> None:
    """Each token is the likeliest for transformers, which is given the image itself, with the same probability."""
    ids = [token.token_id for token in answer.tokens]
    assert len(ids) == NUM_OUTPUT
    whole = torch.tensor([[*prompt.ids, *ids[:-1]]])
    given = dict(seeing.processor()(prompt.pictures, return_tensors="pt"))
    kinds = (whole == seeing.facts.token_id).int()
    if "image_grid_thw" in given:
        given["mm_token_type_ids"] = kinds
    logits = seeing.model(whole, **given).logits[0, -NUM_OUTPUT:].float()
    assert ids == logits.argmax(-1).tolist()
    expected = torch.log_softmax(logits, dim=-1)
    for row, token in zip(expected, answer.tokens, strict=True):
        assert token.logprobs is not None
        assert token.logprobs.logprob == pytest.approx(row[token.token_id].item(), abs=1e-4)


@pytest.mark.parametrize("family", SEEING_FAMILIES)
def test_tokens_behind_images_equal_those_of_transformers(tmp_path: Path, family: str) -> None:
    seeing = make_seeing(tmp_path, family)
    engine = built(tmp_path, num_blocks=128)
    assert engine.core.media_kinds == ("image",)
    one, other = picture(100, 60, 1), picture(60, 100, 2)
    first = Composed(seeing).text(9, 1).image(one).text(5, 2)
    second = Composed(seeing).text(9, 1).image(other).text(5, 2)
    both = Composed(seeing).text(9, 1).image(one).text(3, 4).image(other).text(6, 5)
    text = Composed(seeing).text(21, 6)
    (alone,) = ask(engine, first)
    assert_same(seeing, first, alone)
    together = ask(engine, second, both, first)
    for prompt, answer in zip((second, both, first), together, strict=True):
        assert_same(seeing, prompt, answer)
    # the tokens are the same up to the image, and so is the KV; of another image nothing is
    known = [8, len(first.ids) - 5, len(first.ids) - 1]
    assert [answer.num_cached for answer in together] == [count // 4 * 4 for count in known]
    assert ask(engine, text)[0].tokens


def test_rows_of_an_image_are_kept_for_the_client_who_showed_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeing = make_seeing(tmp_path, "qwen2.5-vl")
    engine = built(tmp_path)
    prompt = Composed(seeing).text(3, 1).image(picture(60, 100, 1)).text(2, 2)
    computed: list[bytes] = []
    compute = Tower._compute

    def counted(tower: Tower, image: PromptImage) -> Tensor:
        computed.append(image.digest)
        return compute(tower, image)

    monkeypatch.setattr(Tower, "_compute", counted)
    found = []
    for number, (salt, lead) in enumerate([(b"mine", 1), (b"mine", 2), (b"yours", 1)]):
        # of the other text nothing is cached but the image
        ids = [lead, *prompt.ids[1:]]
        params = DecodingParams(temperature=0.0, max_tokens=1)
        engine.core.add(key_of(number), Prompt.of(ids, cache_salt=salt, media=prompt.images), params)
        while engine.core.has_work:
            engine.core.step()
        found.append(len(computed))
    assert found == [1, 1, 2]


def test_a_request_whose_images_are_elsewhere_fails_when_its_kv_is_gone_and_no_other(tmp_path: Path) -> None:
    seeing = make_seeing(tmp_path, "mistral3")
    engine = built(tmp_path, num_blocks=24)
    older, newer, last = key_of(1), key_of(2), key_of(3)
    engine.core.add(older, Prompt.of(range(40)), DecodingParams(temperature=0.0, max_tokens=50, ignore_eos=True))
    engine.core.step()
    prompt = Composed(seeing).text(3, 1).image(picture(60, 100, 1)).text(2, 2)
    images = [image.without_payload() for image in prompt.images]
    with pytest.raises(InvalidRequest, match="without its payload"):
        engine.core.add(newer, Prompt.of(prompt.ids, media=images), DecodingParams())
    reservation = engine.core.handoffs.reserve(newer, Prompt.of(prompt.ids, media=images))
    assert reservation is not None
    params = DecodingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    first = [FirstToken(newer, params, 7)]
    engine.core.handoffs.add_reserved(reservation, Prompt.of(prompt.ids, media=images), first)
    outputs: list[RequestOutput] = []
    while engine.core.has_work:
        if not engine.core.is_live(last) and sum(output.key == older for output in outputs) == 45:
            engine.core.add(last, Prompt.of(range(8)), DecodingParams(temperature=0.0, max_tokens=5, ignore_eos=True))
        outputs += engine.core.step()
        engine.core.check()
    (failed,) = [output for output in outputs if output.has_failed]
    assert (failed.key, isinstance(failure_of(failed), Overloaded)) == (newer, True)
    assert sum(len(output.tokens) for output in outputs if output.key == older) == 50
    # nobody waits for the failure until others have ended
    assert [output.key for output in outputs[outputs.index(failed) :]].count(last) >= 4


def test_images_that_are_not_those_of_the_tokens_are_refused(tmp_path: Path) -> None:
    seeing = make_seeing(tmp_path, "mistral3")
    engine = built(tmp_path)
    prompt = Composed(seeing).text(3, 1).image(picture(60, 100, 1))
    (image,) = prompt.images
    wrong = [
        [replace(image, start=2)],
        [image, image],
        [replace(image, start=4)],
    ]
    for images in wrong:
        with pytest.raises(BatonError, match=r"tokens of an image|lie in each other|ends at token"):
            engine.core.add(key_of(1), Prompt.of(prompt.ids, media=images), DecodingParams())
    assert not engine.core.has_work
    without = built(tmp_path, limit_mm_per_prompt="image=0")
    assert not without.core.media_kinds
    with pytest.raises(InvalidRequest, match="takes no image input"):
        without.core.add(key_of(1), Prompt.of(prompt.ids, media=prompt.images), DecodingParams())
