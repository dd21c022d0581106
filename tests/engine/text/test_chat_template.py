"""Rendering equals transformers' apply_chat_template, and nothing a client sends becomes code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from baton.engine.text.chat_template import ChatTemplate
from baton.wire.errors import InvalidRequest, ModelLoadError

CHATML = """{% for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message.reasoning_content %}{{ '<think>' + message.reasoning_content + '</think>' }}{% endif %}
    {%- if message.role == 'assistant' %}
        {% generation %}{{ message.content }}{% endgeneration %}
    {%- else %}
        {{- message.content }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{% endfor %}
{% if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{% endif %}"""
HEADERS = """{{- bos_token }}
{%- set ns = namespace(turns=0) %}
{%- if tools is not none %}
    {{- 'Tools: ' }}
    {%- for tool in tools %}{{ tool | tojson(indent=2) }}{% endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'debug' %}{% continue %}{% endif %}
    {%- set ns.turns = ns.turns + 1 %}
    {{- '<|start_header_id|>' ~ message.role ~ '<|end_header_id|>\\n\\n' }}
    {{- (message.content | trim) ~ '<|eot_id|>' }}
{%- endfor %}
{{- dict(turns=ns.turns) | tojson }} {{ strftime_now('%Y') }}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
INST = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% if message['role'] == 'user' %}[INST] {{ message['content'] }} [/INST]{% else %}
 {{ message['content'] }}{{ eos_token }}{% endif %}{% endfor %}"""

TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "  Hi <b> & 你好 😀 "},
    {"role": "assistant", "content": "Hello\n\nthere", "reasoning": "greet"},
    {"role": "user", "content": "{{ 7 * 7 }} {% raw %}"},
]
TOOLS = [{"type": "function", "function": {"name": "größe", "parameters": {"z": 1, "a": "<x>"}}}]


@pytest.fixture
def folder(checkpoints: Mapping[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoints["llama"], tmp_path / "copy"))


def configure(folder: Path, template: object) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))


def rendered_by_transformers(folder: Path, messages: list[dict[str, Any]], **variables: object) -> object:
    return AutoTokenizer.from_pretrained(folder).apply_chat_template(messages, tokenize=False, **variables)


@pytest.mark.parametrize("template", [CHATML, HEADERS, INST], ids=["chatml", "headers", "inst"])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("variables", [{}, {"tools": TOOLS}, {"enable_thinking": False}], ids=str)
def test_renders_like_transformers(
    folder: Path, template: str, add_generation_prompt: bool, variables: dict[str, Any]
) -> None:
    (folder / "chat_template.jinja").write_text(template)
    ours = ChatTemplate.from_folder(folder).render(TURNS, add_generation_prompt, **variables)
    assert ours == rendered_by_transformers(folder, TURNS, add_generation_prompt=add_generation_prompt, **variables)


@pytest.mark.parametrize("template", [CHATML, HEADERS], ids=["keeps", "trims"])
@pytest.mark.parametrize("ending", ["Well", " Well, \n", "Well<|im_end|>", "assistant"])
def test_a_final_message_is_left_open_like_in_transformers(folder: Path, template: str, ending: str) -> None:
    (folder / "chat_template.jinja").write_text(template)
    turns = [*TURNS, {"role": "assistant", "content": ending}]
    ours = ChatTemplate.from_folder(folder).render(turns, False, continue_final_message=True)
    assert ours == rendered_by_transformers(folder, turns, continue_final_message=True)


def test_a_final_message_without_content_is_left_open_at_its_beginning(folder: Path) -> None:
    configure(folder, CHATML)
    turns = [*TURNS, {"role": "assistant", "content": ""}]
    assert ChatTemplate.from_folder(folder).render(turns, False, True).endswith("<|im_start|>assistant\n")


def test_a_final_message_that_the_template_hides_cannot_be_continued(folder: Path) -> None:
    configure(folder, "{{ messages[0].content }}")
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate.from_folder(folder).render(TURNS, False, continue_final_message=True)
    assert caught.value.param == "continue_final_message"


@pytest.mark.parametrize("has_tools", [True, False])
def test_named_templates_are_chosen_like_in_transformers(folder: Path, has_tools: bool) -> None:
    named = {"default": INST, "tool_use": HEADERS}
    configure(folder, [{"name": name, "template": source} for name, source in named.items()])
    tools = TOOLS if has_tools else None
    ours = ChatTemplate.from_folder(folder).render(TURNS, tools=tools)
    assert ours == rendered_by_transformers(folder, TURNS, add_generation_prompt=True, tools=tools)


def test_the_template_file_wins_over_the_config(folder: Path) -> None:
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "from the processor"}))
    assert ChatTemplate.from_folder(folder).render(TURNS) == "from the processor"
    configure(folder, "from the config")
    assert ChatTemplate.from_folder(folder).render(TURNS) == "from the config"
    (folder / "chat_template.jinja").write_text("from the file")
    assert ChatTemplate.from_folder(folder).render(TURNS) == "from the file"


def test_the_templates_own_refusal_reaches_the_client(folder: Path) -> None:
    configure(folder, INST)
    with pytest.raises(InvalidRequest, match="Roles must alternate") as caught:
        ChatTemplate.from_folder(folder).render(TURNS[1:])
    assert caught.value.param == "messages"


@pytest.mark.parametrize("content", [None, 5, {"a": 1}])
def test_content_that_breaks_the_template_is_the_clients_error(folder: Path, content: object) -> None:
    configure(folder, "{{ 'x' + messages[0].content }}")
    with pytest.raises(InvalidRequest):
        ChatTemplate.from_folder(folder).render([{"role": "user", "content": content}])


def test_a_model_without_template_says_so(folder: Path) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate.from_folder(folder).render(TURNS)
    assert caught.value.code == "chat_template_missing"


def test_text_parts_are_joined(folder: Path) -> None:
    configure(folder, "{{ messages[0].content }}")
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert ChatTemplate.from_folder(folder).render([{"role": "user", "content": parts}]) == "one\ntwo"
    with pytest.raises(InvalidRequest, match="text parts only"):
        ChatTemplate.from_folder(folder).render([{"role": "user", "content": [{"type": "image_url"}]}])


@pytest.mark.parametrize("name", ["messages_", "chat_template", "bos_token", "tokenize", "raise_exception"])
def test_variables_that_are_not_allowed_are_refused(folder: Path, name: str) -> None:
    configure(folder, CHATML)
    variables: dict[str, Any] = {name: "x"}
    with pytest.raises(InvalidRequest, match=name):
        ChatTemplate.from_folder(folder).render(TURNS, True, **variables)


def test_rich_objects_do_not_reach_the_template(folder: Path) -> None:
    configure(folder, "{{ messages[0].content }}")
    with pytest.raises(InvalidRequest, match="JSON values only, not PosixPath"):
        ChatTemplate.from_folder(folder).render([{"role": "user", "content": Path("/")}])


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{% set ns = namespace(_x=1) %}",
        "{{ messages | attr('__class__') | attr('__mro__') | first }}{{ cycler.__init__.__globals__.os }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(folder: Path, template: str) -> None:
    configure(folder, template)
    with pytest.raises(InvalidRequest):
        ChatTemplate.from_folder(folder).render(TURNS)


@pytest.mark.parametrize("template", ["{% if %}", 5, [{"name": "default"}], ["x"]])
def test_a_damaged_template_is_a_load_error(folder: Path, template: object) -> None:
    configure(folder, template)
    with pytest.raises(ModelLoadError):
        ChatTemplate.from_folder(folder)


@pytest.mark.parametrize(
    ("source", "switches"),
    [
        (CHATML, ("enable_thinking",)),
        ("{{ messages[0].content }}", ()),
        ("{{ messages[0].content }}{% if not thinking %}</think>{% endif %}", ("thinking",)),
        ("Reasoning: {{ reasoning_effort or 'medium' }}", ("reasoning_effort",)),
        ("{% if reasoning_effort == 'low' or not enable_thinking %}/no_think{% endif %}", ("enable_thinking",)),
        ("{% if enable_thinking is defined %}{{ raise_exception('no') }}{% endif %}", ()),
    ],
)
def test_a_template_listens_to_the_switches_of_thinking_that_change_its_prompt(
    source: str, switches: tuple[str, ...]
) -> None:
    assert ChatTemplate({"default": source}, {}).thinking_switches() == switches
    assert ChatTemplate({}, {}).thinking_switches() == ()
