"""Media of any kind in prompts: what is of no known kind, or does not fit together, is no message."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import msgspec
import pytest

from baton.wire.codec import Codec, OneOf
from baton.wire.errors import InvalidMessage
from baton.wire.media import MAX_PAYLOAD_BYTES, Medium, require_in_order
from baton.wire.messages.legs import Prefill
from baton.wire.messages.vocabulary import ROUTER_TO_NODE
from baton.wire.prompt import AnyMedium, Prompt
from baton.wire.sampling import DecodingParams
from tests.wire.test_codec import HEADER, sealed
from tests.wire.tone import Tone, register_tones, tone
from tests.wire.wire_samples import IMAGE

TONE = tone(3, [7, 8])


def prefill(*media: Medium) -> Prefill:
    return Prefill(b"h" * 16, 1, Prompt.of(range(10), media=media), DecodingParams(), "decode-1", 8)


def test_media_of_every_known_kind_travel_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidMessage, match="Tone does not belong"):
        ROUTER_TO_NODE.encode(prefill(IMAGE, TONE))
    register_tones(monkeypatch)
    codec, message = Codec(Prefill), prefill(IMAGE, TONE)
    frame = codec.encode(message)
    assert codec.decode(frame) == message
    assert [type(medium) for medium in codec.decode(frame).prompt.media] == [type(IMAGE), Tone]
    assert codec.decode(codec.encode(prefill(TONE.without_payload()))).prompt.media[0].payload == b""
    with pytest.raises(InvalidMessage, match="'Tone'"):
        ROUTER_TO_NODE.decode(frame)


def _without_tag(medium: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: value for name, value in medium.items() if name != "t"}


@pytest.mark.parametrize(
    "change",
    [
        _without_tag,
        lambda medium: {"t": ""},
        lambda medium: {**medium, "t": "Prompt"},
        lambda medium: {**medium, "t": 0},
        lambda medium: {**medium, "rate_hz": 1},
    ],
)
def test_a_medium_names_its_kind_and_has_the_fields_of_no_other(
    change: Callable[[Mapping[str, Any]], Mapping[str, Any]],
) -> None:
    body = msgspec.msgpack.decode(ROUTER_TO_NODE.encode(prefill(IMAGE))[HEADER.size :])
    (medium,) = body["prompt"]["media"]
    assert medium["t"] == "PromptImage"
    assert ROUTER_TO_NODE.decode(sealed(msgspec.msgpack.encode(body))) == prefill(IMAGE)
    body["prompt"]["media"] = [change(medium)]
    with pytest.raises(InvalidMessage):
        ROUTER_TO_NODE.decode(sealed(msgspec.msgpack.encode(body)))


def test_the_mark_of_a_medium_has_its_digest_its_place_and_its_kind() -> None:
    same = replace(TONE, digest=IMAGE.digest, payload=b"", start=IMAGE.start)
    media = [IMAGE, replace(IMAGE, start=2**24 - 1), replace(IMAGE, digest=bytes(16), payload=b""), same, TONE]
    marks = {medium.mark for medium in media}
    assert len(marks) == len(media)
    assert {len(mark) for mark in marks} == {20}
    assert IMAGE.mark == IMAGE.digest + IMAGE.start.to_bytes(4, "little")  # as before there were kinds
    (known,) = (each for each in get_args(AnyMedium) if isinstance(each, OneOf))
    for each in ("kind", "kind_number"):
        assert len({getattr(kind, each) for kind in (*known.kinds, Tone)}) == len(known.kinds) + 1


@pytest.mark.parametrize(
    ("media", "message"),
    [
        ([IMAGE, replace(IMAGE, start=2)], "lie in each other"),
        ([IMAGE, replace(TONE, start=2)], "lie in each other"),
        ([replace(IMAGE, start=5), TONE], "lie in each other, or are out of order"),
        ([replace(IMAGE, start=9)], "ends at token 11 of a prompt of 10"),
    ],
)
def test_media_follow_each_other_within_the_prompt(media: Sequence[Medium], message: str) -> None:
    require_in_order([IMAGE, TONE, replace(IMAGE, start=5), replace(TONE, start=8)], 10)
    with pytest.raises(InvalidMessage, match=message):
        require_in_order(media, 10)


def test_media_of_a_request_fit_a_message() -> None:
    media = [tone(0, [1]), replace(tone(1, bytes(MAX_PAYLOAD_BYTES // 2 - 1)), num_tokens=2)]
    require_in_order(media, 10)
    with pytest.raises(InvalidMessage, match=f"more than {MAX_PAYLOAD_BYTES} bytes"):
        require_in_order([*media, tone(3, [1])], 10)
