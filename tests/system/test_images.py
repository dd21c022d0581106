"""Images through a whole relay: a router, a prefill node, and decode nodes that get KV over shm and over zmq."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from typing import Any

import openai
import pytest
import torch
from PIL import Image

from tests.engine.models.image_files import as_file, picture
from tests.engine.models.seeing import Seeing, make_seeing
from tests.system.harness import MODEL_NAME, Relay, start_relay
from tests.system.reference import LOGPROB_TOLERANCE

ROUTER = ("--prefill-policy", "round_robin", "--decode-policy", "round_robin", "--local-prefill-tokens", "0")
NODE = ("--block-size", "8", "--num-blocks", "96", "--max-num-batched-tokens", "16")
DECODE = (("--kv-transport", "shm"), ("--kv-transport", "zmq"))
_NUM_TOKENS = 6


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    """A model whose tokens have three positions each, and whose tower adds to later layers, too."""
    return make_seeing(tmp_path_factory.mktemp("seeing"), "qwen3-vl")


@pytest.fixture(scope="module")
def relay(seeing: Seeing, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Relay]:
    """One prefill node and two decode nodes."""
    decode = [(*NODE, *flags) for flags in DECODE]
    folder = tmp_path_factory.mktemp("relay")
    found = start_relay(seeing.folder, folder, prefill=[NODE], decode=decode, router=ROUTER)
    try:
        yield found
        found.settle()
        found.stop()
    finally:
        found.close()


def _url(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def part(image: Image.Image) -> dict[str, Any]:
    """An image as a part of a chat's content."""
    return {"type": "image_url", "image_url": {"url": _url(as_file(image))}}


def ask(relay: Relay, parts: Sequence[dict[str, Any]], **options: Any) -> Any:
    """The answer to a chat of these parts, greedy and with log probabilities; `max_tokens` among the options."""
    return relay.client.chat.completions.create(
        model=MODEL_NAME,
        messages=[{"role": "user", "content": list(parts)}],  # type: ignore[misc, list-item]
        temperature=0.0,
        max_tokens=options.pop("max_tokens", _NUM_TOKENS),
        logprobs=True,
        extra_body={"return_token_ids": True, "ignore_eos": True, **options},
    )


@torch.inference_mode()
def assert_same(seeing: Seeing, answer: Any, pictures: Sequence[Image.Image]) -> None:
    """The prompt is what the template says, and each token the likeliest for transformers, as likely as there."""
    (choice,) = answer.choices
    prompt, ids = list(choice.prompt_token_ids), list(choice.token_ids)
    assert answer.usage.prompt_tokens == len(prompt)
    given = dict(seeing.processor()(list(pictures), return_tensors="pt"))
    whole = torch.tensor([[*prompt, *ids[:-1]]])
    given["mm_token_type_ids"] = (whole == seeing.facts.token_id).int()
    logits = seeing.model(whole, **given).logits[0, -len(ids) :].float()
    assert ids == logits.argmax(-1).tolist()
    expected = torch.log_softmax(logits, dim=-1)
    for row, token_id, entry in zip(expected, ids, choice.logprobs.content, strict=True):
        assert entry.logprob == pytest.approx(row[token_id].item(), abs=LOGPROB_TOLERANCE)


def test_answers_to_images_equal_those_of_transformers(relay: Relay, seeing: Seeing) -> None:
    one, other = picture(100, 60, 1), picture(60, 90, 2)
    text = {"type": "text", "text": "What is the answer?"}
    asked = [
        ([part(one), text], [one]),
        ([part(other), text], [other]),
        ([text, part(one), text, part(other)], [one, other]),
    ]
    answers = [ask(relay, parts) for parts, _ in asked for _ in DECODE]
    for (_, pictures), answer in zip([each for each in asked for _ in DECODE], answers, strict=True):
        assert_same(seeing, answer, pictures)
    assert answers[0].choices[0].token_ids != answers[2].choices[0].token_ids
    again = ask(relay, asked[0][0])
    assert_same(seeing, again, [one])
    assert again.usage.prompt_tokens_details.cached_tokens > 16
    assert relay.client.models.retrieve(MODEL_NAME).to_dict()["input_modalities"] == ["text", "image"]


def test_the_other_interfaces_take_images_in_their_own_words(relay: Relay, seeing: Seeing) -> None:
    image = picture(70, 50, 4)
    chat = ask(relay, [part(image), {"type": "text", "text": "What is it?"}])
    text = {"type": "input_text", "text": "What is it?"}
    shown = {"type": "input_image", "image_url": _url(as_file(image))}
    common = {"model": MODEL_NAME, "temperature": 0.0}
    asked = {**common, "max_output_tokens": _NUM_TOKENS, "input": [{"role": "user", "content": [shown, text]}]}
    response: Any = relay.client.post("/responses", cast_to=object, body=asked)
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(as_file(image)).decode()}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": "What is it?"}]
    asked = {**common, "max_tokens": _NUM_TOKENS, "messages": [{"role": "user", "content": blocks}]}
    message: Any = relay.client.post("/messages", cast_to=object, body=asked)
    said = chat.choices[0].message.content
    assert response["output"][0]["content"][0]["text"] == said == message["content"][0]["text"]
    counted = message["usage"]
    assert response["usage"]["input_tokens"] == chat.usage.prompt_tokens
    assert counted["input_tokens"] + counted["cache_read_input_tokens"] == chat.usage.prompt_tokens


def test_images_are_computed_again_where_the_node_with_their_kv_died(relay: Relay, seeing: Seeing) -> None:
    image = picture(90, 90, 3)
    answers = []
    for victim in (relay.decodes[-1], relay.prefills[0]):
        messages = [{"role": "user", "content": [part(image)]}]
        stream: Any = relay.client.chat.completions.create(
            model=MODEL_NAME, messages=messages, temperature=0.0, max_tokens=200, stream=True,  # type: ignore[arg-type]
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )  # fmt: skip
        ids: list[int] = []
        is_killed = False
        for chunk in stream:
            for choice in chunk.choices:
                ids += getattr(choice, "token_ids", None) or ()
            if ids and not is_killed:
                victim.kill()
                is_killed = True
        relay.nodes.remove(victim)
        relay.wait_for_members()
        answers.append(ids)
    whole = ask(relay, [part(image)])
    assert_same(seeing, whole, [image])
    assert [len(ids) for ids in answers] == [200, 200]
    assert answers[0] == answers[1]
    assert answers[0][:_NUM_TOKENS] == list(whole.choices[0].token_ids)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://example.com/a.png", "images are not fetched"),
        ("file:///etc/passwd", "images are not fetched"),
        (_url(b"<svg/>", "image/svg+xml"), "an image must be one of image/png"),
        (_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>"), "none of PNG, JPEG, WebP and GIF"),
        (_url(as_file(picture(64, 64))[:300]), "cannot be decoded"),
        ("data:image/png;base64,@@@@", "not valid base64"),
    ],
)
def test_what_is_no_image_is_refused(relay: Relay, url: str, message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        ask(relay, [{"type": "image_url", "image_url": {"url": url}}])


def test_more_images_than_allowed_are_refused(relay: Relay) -> None:
    with pytest.raises(openai.BadRequestError, match="5 images in one request; 4 are allowed"):
        ask(relay, [part(picture(8, 8))] * 5)


def test_the_token_of_an_image_in_a_text_takes_no_images_place(relay: Relay, seeing: Seeing) -> None:
    text = {"type": "text", "text": seeing.family.tokens[0]}
    with pytest.raises(openai.BadRequestError, match="2 places for 1 images"):
        ask(relay, [text, part(picture(8, 8))])
