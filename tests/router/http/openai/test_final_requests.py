"""How much an answer may hold that is not streamed, and which media a prompt may have."""

from __future__ import annotations

import pytest
from aiohttp.test_utils import make_mocked_request

from baton.router.http.openai.final_requests import (
    MAX_HELD_LOGPROBS,
    MAX_HELD_TOKENS,
    Asked,
    FinalRequests,
    bounded,
)
from baton.router.http.openai.ignored import IgnoredFields
from baton.router.http.openai.prompts import PromptMaker
from baton.router.http.openai.schemas import CompletionRequest
from baton.router.http.served_model import ServedModel
from baton.wire.errors import InvalidRequest
from baton.wire.media import Medium
from baton.wire.messages.membership import DECODE
from baton.wire.sampling import DecodingParams
from tests.router.rig import MODEL, relaying
from tests.wire.tone import tone
from tests.wire.wire_samples import IMAGE

ROOM = 2**24


@pytest.mark.parametrize(("logprobs", "num_choices", "most"), [
    (None, 1, MAX_HELD_TOKENS),
    (None, 128, MAX_HELD_TOKENS // 128),
    (0, 1, MAX_HELD_LOGPROBS),
    (20, 16, MAX_HELD_LOGPROBS // (16 * 21)),
])  # fmt: skip
def test_what_is_asked_for_is_allowed_up_to_the_limit_and_no_further(
    logprobs: int | None, num_choices: int, most: int
) -> None:
    good = DecodingParams(max_tokens=most, logprobs=logprobs)
    assert bounded(good, num_choices, ROOM, "max_tokens") == good
    with pytest.raises(InvalidRequest) as raised:
        bounded(DecodingParams(max_tokens=most + 1, logprobs=logprobs), num_choices, ROOM, "max_completion_tokens")
    assert raised.value.param == "max_completion_tokens"
    limit = MAX_HELD_TOKENS if logprobs is None else MAX_HELD_LOGPROBS
    assert str(limit) in raised.value.message


def test_a_request_without_max_tokens_ends_at_the_limit_instead() -> None:
    params = DecodingParams(logprobs=20)
    assert bounded(params, 2, 100, "max_tokens") == params
    assert bounded(params, 2, ROOM, "max_tokens").max_tokens == MAX_HELD_LOGPROBS // 42


async def test_media_are_taken_of_kinds_that_nodes_compute_and_are_not_cut(prompts: PromptMaker) -> None:
    model = ServedModel(MODEL, prompts, None, 0)
    http, notes = make_mocked_request("POST", "/"), IgnoredFields()
    whole = CompletionRequest.model_validate({"model": MODEL, "prompt": "hello", "max_tokens": 4})
    cut = whole.model_copy(update={"truncate_prompt_tokens": 3})
    async with relaying() as rig:
        await rig.join(DECODE, media=("image",))
        stage = FinalRequests(rig.relay, None, rig.registry.max_request_tokens)
        (asked,) = await stage.of(Asked(model, whole, [range(9)], "messages", media=[IMAGE]), http, notes)
        assert asked.prompt.media == (IMAGE,)
        refused: list[tuple[CompletionRequest, list[Medium], str]] = [
            (whole, [IMAGE, tone(4, [1])], "messages: the nodes of this model take no tone input"),
            (cut, [IMAGE], "a prompt with image input is not truncated"),
        ]
        for request, media, problem in refused:
            with pytest.raises(InvalidRequest, match=problem):
                await stage.of(Asked(model, request, [range(9)], "messages", media=media), http, notes)
