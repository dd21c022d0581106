"""/openapi.json and /docs: the document lists what there is and says what the server checks."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from openapi_spec_validator import OpenAPIV31SpecValidator

from baton.router.http.docs import serving as docs_serving
from baton.router.http.docs.openapi import openapi_document
from baton.router.http.docs.page import docs_page
from baton.router.http.docs.routes import ROUTES
from baton.router.http.docs.serving import add_docs
from baton.router.http.openai.prompts import PromptMaker
from baton.router.http.openai.schemas import CompletionRequest
from baton.router.http.resume.logs import Memory
from baton.router.http.resume.streams import Streams
from tests.router.fake_node import answering
from tests.router.http_client import fetch, post_chat, post_completion
from tests.router.rig import MODEL, Server, serving


@pytest.fixture
async def server(prompts: PromptMaker) -> AsyncIterator[Server]:
    async with serving(prompts, streams=Streams(Memory(), 60.0)) as running:
        yield running


@pytest.fixture
async def document(server: Server) -> dict[str, Any]:
    reply = await fetch(server, "GET", "/openapi.json")
    assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
    found: dict[str, Any] = reply.json()
    return found


def _fields(document: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = document["components"]["schemas"][name]["properties"]
    return found


def _number(field: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(branch for branch in field["anyOf"] if branch["type"] != "null")
    return found


def _schemas_in(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for member in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _schemas_in(member)


def _require_valid(document: dict[str, Any]) -> None:
    """The validator also compares each default with its schema."""
    errors = OpenAPIV31SpecValidator(document).iter_errors()
    assert [f"{error.message}: {error.schema}" for error in errors] == []


async def test_the_document_is_valid(document: dict[str, Any]) -> None:
    _require_valid(document)
    request = {"type": "object", "properties": {"n": {"type": "integer", "default": "many"}}}
    document |= {"paths": {}, "components": {"schemas": {"Request": request}}}  # the validator does look at defaults
    with pytest.raises(AssertionError, match="'many'"):
        _require_valid(document)


async def test_every_route_is_in_the_document_and_every_row_is_a_route(document: dict[str, Any]) -> None:
    listed = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert set(ROUTES) <= listed
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert operation["summary"], (method, path)
            row = ROUTES.get((method.upper(), path))
            assert ("requestBody" in operation) is (row is not None and row.request is not None), (method, path)


async def test_what_is_read_has_the_media_type_that_the_document_promises(
    server: Server, document: dict[str, Any]
) -> None:
    for path, methods in document["paths"].items():
        promised = methods.get("get", {}).get("responses", {}).get("200", {}).get("content", {})
        if "{" in path or not promised or "text/event-stream" in promised:
            continue
        reply = await fetch(server, "GET", path)
        assert reply.headers["content-type"].partition(";")[0] in promised, path


def test_a_route_without_a_row_is_listed_by_its_docstring() -> None:
    async def handler(http: web.Request) -> web.Response:
        """Say hello. And more."""
        return web.Response()

    app = web.Application()
    app.router.add_get("/hello/{who:.+}", handler)
    add_docs(app)
    operation = openapi_document(app.router.routes())["paths"]["/hello/{who}"]["get"]
    assert operation["summary"] == "Say hello"
    assert [parameter["name"] for parameter in operation["parameters"]] == ["who"]


async def test_every_reference_leads_somewhere_and_every_field_has_a_type(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for schema in _schemas_in(document):
        if "$ref" in schema:
            assert schema["$ref"].rpartition("/")[2] in schemas
    for name in ("ChatCompletionRequest", "CompletionRequest", "ResponsesRequest", "MessagesRequest", "Message"):
        for field, schema in _fields(document, name).items():
            branches = schema.get("anyOf", [schema])
            assert all({"type", "enum", "$ref", "anyOf", "const"} & branch.keys() for branch in branches), (name, field)


async def test_the_document_has_the_ranges_that_are_checked(document: dict[str, Any]) -> None:
    chat = _fields(document, "ChatCompletionRequest")
    assert _number(chat["temperature"]) == {"type": "number", "minimum": 0, "maximum": 2}
    assert _number(chat["top_p"]) == {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
    assert _number(chat["max_completion_tokens"])["minimum"] == 1
    assert _number(_fields(document, "ResponsesRequest")["max_output_tokens"])["minimum"] == 1
    assert _number(chat["top_logprobs"])["maximum"] == 20
    assert _number(_fields(document, "CompletionRequest")["logprobs"])["maximum"] == 5
    assert document["components"]["schemas"]["CompletionRequest"]["required"] == ["model", "prompt"]


async def test_a_field_that_is_not_supported_lists_the_values_that_are_taken(document: dict[str, Any]) -> None:
    assert _fields(document, "ChatCompletionRequest")["functions"]["enum"] == [None, []]
    assert _fields(document, "ResponsesRequest")["n"]["enum"] == [None, 1]


@pytest.mark.parametrize(("name", "edges"), [
    ("temperature", (0, 2)), ("presence_penalty", (-2, 2)), ("top_k", (-1, 2**31 - 1)), ("n", (1, 16)),
])  # fmt: skip
async def test_values_at_the_edges_of_a_range_are_taken_and_beyond_refused(
    server: Server, prompts: PromptMaker, name: str, edges: tuple[int, int]
) -> None:
    await server.rig.pair(answering(prompts.tokenizer.encode("Yes."), "length"))
    low, high = edges
    for value in edges:
        assert (await post_completion(server, **{name: value})).status == 200
    for value in (low - 1, high + 1 if name != "n" else 129):
        assert (await post_completion(server, **{name: value})).error["param"] == name


async def test_answers_have_the_members_that_the_document_promises(server: Server, prompts: PromptMaker) -> None:
    await server.rig.pair(answering(prompts.tokenizer.encode("Yes."), "length"))
    document = (await fetch(server, "GET", "/openapi.json")).json()
    schemas = document["components"]["schemas"]

    def require(value: Any, schema: dict[str, Any], place: str) -> None:
        schema = schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
        for name in schema.get("required", ()):
            assert name in value, (place, name)
        for name, member in schema.get("properties", {}).items():
            require(value[name], member, f"{place}.{name}")
        if "const" in schema or "enum" in schema:
            assert value in schema.get("enum", [schema.get("const")]), place
        for item in value if schema.get("type") == "array" else ():
            require(item, schema["items"], f"{place}[]")

    body = json.dumps({"model": MODEL, "input": "Hi"}).encode()
    require((await post_chat(server)).json(), schemas["ChatCompletion"], "chat")
    require((await post_completion(server)).json(), schemas["Completion"], "completion")
    require((await fetch(server, "POST", "/v1/responses", body)).json(), schemas["Response"], "response")
    said = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
    for path, sent, name in (
        ("", said, "AnthropicMessage"),
        ("/count_tokens", said, "AnthropicTokenCount"),
        ("", {}, "AnthropicError"),
    ):
        reply = await fetch(server, "POST", f"/v1/messages{path}", json.dumps(sent).encode())
        require(reply.json(), schemas[name], name)
    require((await fetch(server, "GET", "/v1/models")).json(), schemas["ModelList"], "models")
    require((await fetch(server, "GET", "/health")).json(), schemas["Health"], "health")
    require((await fetch(server, "GET", "/v1/models/other")).json(), schemas["Error"], "error")


async def test_an_empty_answer_promises_no_content(document: dict[str, Any]) -> None:
    ping = document["paths"]["/ping"]
    assert [ping[method]["responses"]["200"]["content"] for method in ("get", "post")] == [{}, {}]


@pytest.mark.parametrize("path", ["/openapi.json", "/docs"])
async def test_the_document_is_made_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    made_by: list[int] = []

    def noted(*args: Any, **options: Any) -> dict[str, Any]:
        made_by.append(threading.get_ident())
        return openapi_document(*args, **options)

    monkeypatch.setattr(docs_serving, "openapi_document", noted)
    app = web.Application()
    add_docs(app)
    async with TestClient(TestServer(app)) as client:
        assert (await client.get(path)).status == 200
    assert made_by
    assert threading.get_ident() not in made_by


async def test_the_page_lists_every_operation_and_loads_nothing(server: Server, document: dict[str, Any]) -> None:
    reply = await fetch(server, "GET", "/docs")
    page = reply.body.decode()
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert reply.headers["content-security-policy"].startswith("default-src 'none'")
    for path, methods in document["paths"].items():
        for method in methods:
            assert f"<code>{method.upper()} {path}</code>" in page
    assert all(f"<code>{name}</code>" in page for name in CompletionRequest.model_fields)
    assert "<script" not in page
    assert "src=" not in page
    assert "http" not in page


def test_the_page_escapes_what_it_shows() -> None:
    document = {"info": {"title": "<b>"}, "paths": {}, "components": {"schemas": {}}}
    assert "<b>" not in docs_page(document)
