"""Chat templates that come with a request: rendered as the model's own, and harmless whatever they do."""

from __future__ import annotations

from dataclasses import replace

import psutil
import pytest

from baton.router.http.openai.prompts import PromptMaker
from baton.router.http.openai.request_templates import RequestTemplates
from baton.router.http.openai.schemas import ChatCompletionRequest
from baton.wire.errors import InvalidRequest

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well,"}]
NO_ARGUMENTS = {"messages": MESSAGES}


async def test_the_request_decides_what_the_model_sees(prompts: PromptMaker) -> None:
    template = "{% for message in messages %}[{{ message.role }}] {{ message.content }}.{% endfor %}{{ eos_token }}"
    request = ChatCompletionRequest.model_validate(
        {"model": "m", "messages": MESSAGES, "chat_template": template, "continue_final_message": True}
    )
    trusting = replace(prompts, request_templates=RequestTemplates())
    prompt_ids, _ = await trusting.chat_prompt(request)
    assert prompts.tokenizer.decode(prompt_ids, skip_special_tokens=False) == "[user] Hi.[assistant] Well,"


@pytest.mark.parametrize(
    "template",
    [
        "{% if %}",
        "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception('no') }}",
        "{{ 'x' * 2**23 }}",
        "{{ 'x' * 2**40 }}",
    ],
    ids=["broken", "escape", "refusal", "text", "memory"],
)
async def test_what_a_template_does_wrong_is_the_clients_mistake(template: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await RequestTemplates().render(template, {}, NO_ARGUMENTS)
    assert len(caught.value.message) < 400


async def test_a_template_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.router.http.openai.request_templates.TIMEOUT_S", 0.2)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = a %}{% endfor %}{% endfor %}"
    children = {child.pid for child in psutil.Process().children()}
    with pytest.raises(InvalidRequest, match="longer than"):
        await RequestTemplates().render(endless, {}, NO_ARGUMENTS)
    assert {child.pid for child in psutil.Process().children()} <= children
