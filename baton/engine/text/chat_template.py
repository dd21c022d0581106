"""Renders a conversation with the chat template of the checkpoint, the way transformers does.

The template is code from the checkpoint's publisher: it runs in jinja2's immutable sandbox, sees plain JSON
values only, and comes from the model's folder; one from a request is rendered in a process of its own
(`render_process`). A request may set the variables in `ALLOWED_VARIABLES` and no others. Rendering is plain
computation of unknown length, so a server does it off its event loop. Knows nothing of tokens.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from baton.engine.text.checkpoint_files import TOKENIZER_CONFIG, SpecialTokens, read_json, read_text
from baton.wire.errors import InvalidRequest, ModelLoadError

IMAGE = "image"
"""The type of a part of content that stands for an image."""
_PROCESSORS_FILE = "chat_template.json"
ALLOWED_VARIABLES = frozenset(
    {
        "builtin_tools",
        "custom_tools",
        "date_string",
        "documents",
        "enable_thinking",
        "preserve_thinking",
        "reasoning_effort",
        "thinking",
        "thinking_budget",
        "tool_choice",
        "tools",
        "tools_in_user_message",
    }
)

# What a template that does not fit the conversation may raise besides its own errors, for instance "text" +
# None.
_RENDER_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
_THINKING_CHOICES = {
    "enable_thinking": (True, False),
    "thinking": (True, False),
    "reasoning_effort": ("high", "low"),
}
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """The chat templates of one checkpoint; see `from_folder`."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """`sources` maps names to jinja text: "default", and possibly "tool_use" for requests with tools.
        `special_tokens` are variables such as "bos_token". Raises `ModelLoadError` for a template that is
        not valid jinja."""
        self._special_tokens = dict(special_tokens)
        self.text = "\n".join(sources.values())
        environment = _environment()
        try:
            self._templates = {name: environment.from_string(source) for name, source in sources.items()}
        except jinja2.TemplateError as error:
            raise ModelLoadError(f"the chat template cannot be compiled: {error}") from error

    @classmethod
    def from_folder(cls, path: Path) -> ChatTemplate:
        """The chat template of the checkpoint in `path`. Raises `ModelLoadError` for files that cannot be used.

        It is in template files, or else in the tokenizer config, or in the file that image processors have for it. A
        checkpoint without any is fine until something is rendered.
        """
        sources = _template_files(path)
        for name in (TOKENIZER_CONFIG, _PROCESSORS_FILE):
            sources = sources or _configured_templates(read_json(path / name).get("chat_template"))
        return cls(sources, SpecialTokens.from_folder(path).named)

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """The variables for special tokens, by name."""
        return self._special_tokens

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: object,
    ) -> str:
        """The conversation as the text that the model continues.

        Content that is a list of text parts is joined with newlines first, and left as it is when there are images
        among them; see `_variants` for calls.
        `continue_final_message` ends the text with the last message's content, so that the model continues that
        message. `variables` are those of `ALLOWED_VARIABLES`.

        Raises:
            InvalidRequest: no template (code "chat_template_missing"), a variable that is not allowed, or a
                conversation that the template refuses, with the template's own message.
        """
        unknown = sorted(variables.keys() - ALLOWED_VARIABLES)
        if unknown:
            raise InvalidRequest(f"unknown chat template variable: {', '.join(unknown)}", param="chat_template_kwargs")
        template = self._choose(bool(variables.get("tools")))
        context: dict[str, object] = {"tools": None, "documents": None, **self._special_tokens}
        context |= {name: _plain(value) for name, value in variables.items()}
        context |= {
            "messages": [_prepare(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
        }
        render = _open_ended if continue_final_message else jinja2.Template.render
        reason: Exception | None = None
        for variant in _variants(context["messages"]):
            try:
                return render(template, {**context, "messages": variant})
            except _RENDER_ERRORS as error:
                reason = reason or error
        raise InvalidRequest(f"the chat template refused the messages: {reason}", param="messages") from reason

    def thinks_unless_told(self) -> bool:
        """Whether the model reasons before it answers unless it is told not to: a prompt is the same with
        `enable_thinking` as without it, and another one when that is false."""
        try:
            unset, true, false = map(self._greeting, ({}, {"enable_thinking": True}, {"enable_thinking": False}))
        except InvalidRequest:
            return False
        return unset == true != false

    def thinking_switches(self) -> tuple[str, ...]:
        """The variables that change whether, or how much, the model reasons: those of which two values make two
        prompts."""
        return tuple(name for name, (more, less) in _THINKING_CHOICES.items() if self._differs(name, more, less))

    def _differs(self, name: str, more: object, less: object) -> bool:
        try:
            return self._greeting({name: more}) != self._greeting({name: less})
        except InvalidRequest:
            return False

    def _greeting(self, variables: Mapping[str, Any]) -> str:
        return self.render([{"role": "user", "content": "Hello"}], **variables)

    def _choose(self, has_tools: bool) -> jinja2.Template:
        name = "tool_use" if has_tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise InvalidRequest(
                "this model has no chat template: use the completions endpoint", code="chat_template_missing"
            )
        return self._templates[name]


def _variants(messages: Any) -> Iterator[list[Any]]:
    """The messages; and where there are calls, forms of them for templates that cannot do with these: some want
    arguments as text, some want a content in every message."""
    yield messages
    if any(message.get("tool_calls") for message in messages):
        texts = _with_argument_texts(messages)
        yield texts
        for found in (messages, texts):
            yield [{**message, "content": message.get("content") or ""} for message in found]


def _with_argument_texts(messages: Any) -> list[Any]:
    """The messages with the arguments of their calls as JSON text."""
    texts: list[Any] = []
    for message in messages:
        calls = [
            {**call, "function": {**call["function"], "arguments": _argument_text(call["function"]["arguments"])}}
            for call in message.get("tool_calls") or ()
        ]
        texts.append({**message, "tool_calls": calls} if calls else message)
    return texts


def _argument_text(arguments: object) -> object:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _open_ended(template: jinja2.Template, context: Mapping[str, Any]) -> str:
    """The rendering, cut behind the content of the last message. A mark behind that content finds the place; a template
    that trims contents trims the space behind the mark, and then the text is to be trimmed as well."""
    *earlier, last = context["messages"]
    mark = secrets.token_hex(16)
    marked = {**last, "content": f"{last.get('content') or ''}{mark} "}
    text, found, rest = template.render({**context, "messages": [*earlier, marked]}).rpartition(mark)
    if not found:
        raise InvalidRequest("the chat template does not show the final message", param="continue_final_message")
    return text if rest.startswith(" ") else text.rstrip()


def _template_files(folder: Path) -> dict[str, str]:
    files = {"default": folder / "chat_template.jinja"}
    files |= {file.stem: file for file in (folder / "additional_chat_templates").glob("*.jinja")}
    return {name: read_text(file) for name, file in files.items() if file.is_file()}


def _configured_templates(entry: object) -> dict[str, str]:
    """The `chat_template` entry of a tokenizer config: one template, or a list of named ones."""
    match entry:
        case None:
            return {}
        case str():
            return {"default": entry}
        case list():
            return dict(map(_named_template, entry))
        case _:
            raise ModelLoadError("chat_template in tokenizer_config.json must be a text or a list of named templates")


def _named_template(item: object) -> tuple[str, str]:
    match item:
        case {"name": str(name), "template": str(source)}:
            return name, source
        case _:
            raise ModelLoadError("each entry of chat_template in tokenizer_config.json needs a name and a template")


def _prepare(message: Mapping[str, object]) -> dict[object, object]:
    """The message as the template sees it: plain values, text parts joined, reasoning under each of its
    usual names."""
    prepared = {_plain(key): _plain(value) for key, value in message.items()}
    content = prepared.get("content")
    if isinstance(content, list) and not any(isinstance(part, dict) and part.get("type") == IMAGE for part in content):
        prepared["content"] = "\n".join(_part_text(part) for part in content)
    reasoning = next((prepared[name] for name in _REASONING_FIELDS if prepared.get(name) is not None), None)
    if reasoning is not None:
        prepared = {"thinking": reasoning, **prepared, "reasoning_content": reasoning}
    return prepared


def _part_text(part: object) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case _:
            raise InvalidRequest("message content may hold text parts only", param="messages")


def _plain(value: object) -> object:
    """`value` rebuilt from JSON types, so that a template can reach no method of a richer object."""
    match value:
        case str():
            return str.__str__(value)  # an enum of strings has further methods
        case None | bool() | int() | float():
            return value
        case Mapping():
            return {_plain(key): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case _:
            raise InvalidRequest(
                f"a chat template takes JSON values only, not {type(value).__name__}", param="messages"
            )


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, LoopControlExtension]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _DictFunction(),
        "namespace": _PublicNamespace,
    }
    return environment


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks the answers for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares an ordinary set

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class _DictFunction:
    """`dict(...)` and `dict.fromkeys(...)` without the class behind them."""

    def __call__(self, /, *args: Any, **items: Any) -> dict[Any, Any]:
        return dict(*args, **items)

    def fromkeys(self, keys: Iterable[object], value: object = None) -> dict[object, object]:
        return dict.fromkeys(keys, value)


class _PublicNamespace(Namespace):
    """jinja2's namespace, without names that begin with an underscore."""

    def __init__(self, /, *args: Any, **attributes: Any) -> None:
        collected = dict(*args, **attributes)
        for name in collected:
            _refuse_private(name)
        super().__init__(collected)

    def __setitem__(self, name: str, value: object) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold the private name {name!r}")


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's own filter: no HTML escapes, and characters stay as they are."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(date_format: str) -> str:
    return datetime.now().strftime(date_format)
