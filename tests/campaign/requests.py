"""The requests of a campaign's clients, drawn from a seed: arguments of the `openai` client's `create`.

Owns what is asked: completions of token ids, chats and responses, greedy and sampled, with log probabilities, several
choices, stop strings, grammars, schemas, functions that have to be called, and images where the model sees. Schemas are
small, so that a random model comes to their end. Knows neither answers nor faults.
"""

from __future__ import annotations

import base64
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from tests.engine.models.image_files import as_file, picture
from tests.system.harness import MODEL_NAME

Body: TypeAlias = dict[str, Any]
COMPLETIONS, CHAT, RESPONSES = "completions", "chat", "responses"
IMAGE, TEXT, SCHEMA, CALLS = "image", "text", "schema", "calls"
MAX_PROMPT = 600
VOCABULARY = 316
MAX_CHOICES = 3
_MAX_EDGE = 160
_WORDS = (
    "river",
    "letter",
    "answer",
    "station",
    "engine",
    "story",
    "question",
    "brown",
    "the",
    "and",
    "of",
    "to",
    "42",
)
_GRAMMARS: tuple[Body, ...] = (
    {"regex": "([a-z]{3} [0-9]{2}[,;]){20}"},
    {"json": {"type": "array", "items": {"enum": ["north", "north-east", 7, None]}, "minItems": 12, "maxItems": 40}},
    {"grammar": 'root ::= pair{16,40}\npair ::= "(" [a-z]+ "=" [0-9]{2} ")" | "(" pair pair ")"'},
)
_SPACES = {f"{188 + byte}": -100 for byte in b"\t\n\r "}
"""In the vocabulary of `tests.checkpoints`: random models would fill JSON with them, and come to no end."""
_DIGIT: Body = {"type": "integer", "minimum": 0, "maximum": 9}


def _object(**properties: Body) -> Body:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


_SCHEMAS: Mapping[str, Body] = {
    "add": _object(a=_DIGIT, b=_DIGIT),
    "go": _object(to={"enum": ["north", "north-east", 7, None]}, fast={"type": "boolean"}),
    "tag": _object(name={"type": "string", "maxLength": 8}, tags={"type": "array", "items": _DIGIT, "maxItems": 4}),
    "plan": _object(steps={"type": "array", "items": _object(x=_DIGIT, y=_DIGIT), "minItems": 2, "maxItems": 5}),
}
"""Of functions, and of answers."""


@dataclass(frozen=True, slots=True)
class Request:
    """`body`: arguments of the client's `create` for this interface. `schemas`: by the name of a function what its
    arguments, and by "" what the text has to be valid by."""

    api: str
    kind: str
    body: Body
    schemas: Mapping[str, Body] = field(default_factory=dict)

    @property
    def num_choices(self) -> int:
        """How many are asked for."""
        return int(self.body.get("n", 1))

    def with_stop(self, stop: str) -> Request:
        """It ends before this text."""
        return Request(self.api, self.kind, self.body | {"stop": [stop]}, self.schemas)


def make_request(rng: random.Random, max_tokens: int, structured: float, *, sees: bool) -> Request:
    """Of any interface. `structured`: the share of completions with a grammar."""
    api = rng.choices((COMPLETIONS, CHAT, RESPONSES), (35, 40, 25))[0]
    num_tokens = round(8 + (max_tokens - 8) * rng.random() ** 1.5)
    if api == COMPLETIONS:
        return Request(api, TEXT, _completion(rng, num_tokens, structured))
    kind = rng.choices((TEXT, SCHEMA, CALLS, IMAGE), (20, 25, 30, 25 * sees))[0]
    make, is_json = _chat if api == CHAT else _response, kind in (SCHEMA, CALLS)
    request = make(rng, kind, max_tokens if is_json else num_tokens)
    more: Body = {"logit_bias": _SPACES} if is_json and rng.random() < 0.8 else {"ignore_eos": not is_json}
    request.body["extra_body"] |= more
    return request


def _completion(rng: random.Random, max_tokens: int, structured: float) -> Body:
    length = min(round(2 ** rng.uniform(1, 9.2)), MAX_PROMPT)
    sampling = _sampling(rng)
    more: Body = {"ignore_eos": True, "return_token_ids": True}
    if rng.random() < 0.3:
        sampling["logprobs"] = rng.choice((0, 2))
    if rng.random() < structured:
        more |= {"structured_outputs": rng.choice(_GRAMMARS), "ignore_eos": False}
    prompt = [rng.randrange(VOCABULARY) for _ in range(length)]
    return {"model": MODEL_NAME, "prompt": prompt, "max_tokens": max_tokens, **sampling, "extra_body": more}


def _chat(rng: random.Random, kind: str, max_tokens: int) -> Request:
    body: Body = {"model": MODEL_NAME, "messages": _messages(rng, kind, "text", _shown_in_chat)}
    body |= {"max_tokens": max_tokens, **_sampling(rng), "extra_body": {"return_token_ids": True}}
    if rng.random() < 0.3:
        body |= {"logprobs": True, "top_logprobs": rng.choice((0, 2))}
    schemas = _drawn_schemas(rng, kind)
    if kind == SCHEMA:
        wanted = {"name": "answer", "schema": schemas[""], "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": wanted}
    elif kind == CALLS:
        functions = [{"name": name, "parameters": schema} for name, schema in schemas.items()]
        body["tools"] = [{"type": "function", "function": each} for each in functions]
        body |= _wanted_calls(rng, {"type": "function", "function": {"name": rng.choice(list(schemas))}})
    return Request(CHAT, kind, body, schemas)


def _response(rng: random.Random, kind: str, max_tokens: int) -> Request:
    """Its interface tells no ids of tokens but in log probabilities, and makes one choice."""
    sampling, more = _sampling(rng), {"return_tokens_as_token_ids": True}
    more |= {name: sampling.pop(name) for name in ("seed", "frequency_penalty") if name in sampling}
    sampling.pop("n", None)
    body: Body = {"model": MODEL_NAME, "input": _messages(rng, kind, "input_text", _shown_in_response)}
    body |= {"max_output_tokens": max_tokens, **sampling, "extra_body": more}
    schemas = _drawn_schemas(rng, kind)
    if kind == SCHEMA:
        body["text"] = {"format": {"type": "json_schema", "name": "answer", "schema": schemas[""], "strict": True}}
    elif kind == CALLS:
        body["tools"] = [{"type": "function", "name": name, "parameters": each} for name, each in schemas.items()]
        body |= _wanted_calls(rng, {"type": "function", "name": rng.choice(list(schemas))})
    if kind != CALLS and rng.random() < 0.7:
        body["include"] = ["message.output_text.logprobs"]
    return Request(RESPONSES, kind, body, schemas)


def _drawn_schemas(rng: random.Random, kind: str) -> dict[str, Body]:
    if kind == CALLS:
        return dict(rng.sample(list(_SCHEMAS.items()), rng.choice((1, 2, 3))))
    return {"": rng.choice(list(_SCHEMAS.values()))} if kind == SCHEMA else {}


def _wanted_calls(rng: random.Random, named: Body) -> Body:
    return {"tool_choice": rng.choice(("required", named)), "parallel_tool_calls": rng.random() < 0.5}


def _sampling(rng: random.Random) -> Body:
    """Half of all are greedy."""
    if rng.random() < 0.5:
        return {"temperature": 0.0}
    body: Body = {"temperature": rng.choice((0.7, 1.0, 1.3)), "seed": rng.randrange(2**31)}
    body["n"] = rng.choice((1, 1, 2, MAX_CHOICES))
    if rng.random() < 0.3:
        body |= {"top_p": 0.9, "frequency_penalty": 0.4}
    return body


def _messages(rng: random.Random, kind: str, text_type: str, shown: Callable[[str], Body]) -> list[Body]:
    content: Any = _text(rng)
    if kind == IMAGE:
        content = [{"type": text_type, "text": content}, *(shown(_image(rng)) for _ in range(rng.choice((1, 1, 2))))]
        rng.shuffle(content)
    before = [{"role": "system", "content": _text(rng)}] * (rng.random() < 0.5)
    return [*before, {"role": "user", "content": content}]


def _shown_in_chat(url: str) -> Body:
    return {"type": "image_url", "image_url": {"url": url}}


def _shown_in_response(url: str) -> Body:
    return {"type": "input_image", "image_url": url}


def _text(rng: random.Random) -> str:
    return " ".join(rng.choices(_WORDS, k=round(2 ** rng.uniform(1, 5.5))))


def _image(rng: random.Random) -> str:
    width, height = (rng.randint(16, _MAX_EDGE) for _ in range(2))
    file = as_file(picture(width, height, rng.randrange(1000)))
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"
