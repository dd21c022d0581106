"""/openapi.json: the OpenAPI 3.1 document of one application.

Owns the document's form. Request bodies come from the schemas that check them, their ranges from `baton.wire.sampling`,
the list of paths from the application itself, so that no route can be missing. Where JSON Schema cannot say what the
server checks (a sum of lengths, one field beside another, 1.0 which is no integer here) the document allows more.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, get_args, get_type_hints

from aiohttp import web
from pydantic import BaseModel

from baton.router.http.docs.answers import ANSWERS
from baton.router.http.docs.routes import EVENTS, JSON, ROUTES, RouteDoc
from baton.router.http.openai.errors import http_layer_body
from baton.wire.codec import Bounds
from baton.wire.sampling import DecodingParams

VERSION = "1"
_LIMITS_OF_OUTPUT = ("max_completion_tokens", "max_output_tokens")
_EVERY_ROUTE = (401, 429, 500)
_PARAMETER = re.compile(r"\{(\w+)\}")
_Schema = dict[str, Any]


def openapi_document(routes: Iterable[web.AbstractRoute], title: str = "Baton", root_path: str = "") -> dict[str, Any]:
    """The document over `routes` of an application, which a proxy has under `root_path`."""
    paths: dict[str, dict[str, Any]] = {}
    schemas: dict[str, _Schema] = dict(ANSWERS)
    for route in routes:
        if route.resource is None or route.method in ("HEAD", "OPTIONS", "*"):
            continue
        path = route.resource.canonical
        if path.endswith("/") and path != "/":
            continue  # the same route without the slash is listed
        doc = ROUTES.get((route.method, path)) or RouteDoc(_summary(route.handler))
        paths.setdefault(path, {})[route.method.lower()] = _operation(route.method, path, doc, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": title,
            "version": VERSION,
            "description": "An endpoint in the formats of OpenAI and Anthropic.",
        },
        "servers": [{"url": f"/{root_path.strip('/')}"}],
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def _summary(handler: object) -> str:
    return (inspect.getdoc(handler) or "").split(". ")[0].split("\n")[0].rstrip(".")


def _operation(method: str, path: str, doc: RouteDoc, schemas: dict[str, _Schema]) -> dict[str, Any]:
    name = "_".join(re.findall(r"\w+", f"{method.lower()} {path}"))
    operation: dict[str, Any] = {"operationId": name, "summary": doc.summary, "responses": _responses(doc)}
    if parameters := _PARAMETER.findall(path):
        operation["parameters"] = [
            {"name": each, "in": "path", "required": True, "schema": {"type": "string"}} for each in parameters
        ]
    if doc.request is not None:
        reference = {"$ref": f"#/components/schemas/{doc.request.__name__}"}
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": reference}}}
        schemas.update(request_schemas(doc.request))
    return operation


def _responses(doc: RouteDoc) -> dict[str, Any]:
    answer = {"$ref": f"#/components/schemas/{doc.answer}"} if doc.answer else {}
    content: dict[str, Any] = {doc.media_type: {"schema": answer} if answer else {}} if doc.media_type else {}
    if doc.streams:
        content[EVENTS] = {"schema": {"description": "Server-sent events; `data` of each is JSON"}}
    error = {JSON: {"schema": {"$ref": f"#/components/schemas/{doc.error}"}}}
    found: dict[str, Any] = {"200": {"description": "Success", "content": content}}
    for status in sorted({*_EVERY_ROUTE, *doc.statuses}):
        description = http_layer_body(status)["error"]["message"]
        found[str(status)] = {"description": description.capitalize(), "content": error}
    if doc.answer == "Health":  # a probe reads the same body whatever the status
        found["503"]["content"] = {JSON: {"schema": answer}}
    found["default"] = {"description": "Any other error", "content": error}
    return found


def request_schemas(request: type[BaseModel]) -> dict[str, _Schema]:
    """The schema of a request body and of the schemas in it, by name."""
    whole = request.model_json_schema(ref_template="#/components/schemas/{model}")
    found: dict[str, _Schema] = {request.__name__: whole, **whole.pop("$defs", {})}
    models = {model.__name__: model for model in (request, *_models_in(request))}
    for name, schema in found.items():
        model = models.get(name)
        _complete(schema, {} if model is None else getattr(model, "unsupported", {}))
    return found


def _models_in(request: type[BaseModel]) -> list[type[BaseModel]]:
    found: list[type[BaseModel]] = []
    waiting: list[Any] = [field.annotation for field in request.model_fields.values()]
    while waiting:
        hint = waiting.pop()
        if isinstance(hint, type) and issubclass(hint, BaseModel):
            found.append(hint)
            waiting += [field.annotation for field in hint.model_fields.values()]
        else:
            waiting += get_args(hint)
    return found


def _complete(schema: _Schema, unsupported: Mapping[str, tuple[object, ...]]) -> None:
    """Add what pydantic does not know: ranges, that null is the default, and neutral values of unsupported fields."""
    properties: dict[str, _Schema] = schema.get("properties", {})
    ranges = _ranges()
    for name, field in properties.items():
        field.pop("title", None)
        for branch in (field, *field.get("anyOf", ())):
            if branch.get("type") in ("integer", "number"):
                branch.update({key: value for key, value in ranges.get(name, {}).items() if key not in branch})
        if name not in schema.get("required", ()):
            properties[name] = _with_null(field)
    for name, neutral in unsupported.items():
        properties[name] = {
            "enum": [None, *neutral],
            "description": "Not supported: only values that ask for nothing are taken.",
        }
    schema.pop("title", None)


def _with_null(field: _Schema) -> _Schema:
    if {"type": "null"} in field.get("anyOf", ()):
        return field
    if field.get("default") == []:
        field["default"] = None  # the empty value of a field need not have its form
    rest: _Schema = {key: field.pop(key) for key in ("default", "description") if key in field}
    return {"anyOf": [field, {"type": "null"}], **rest}


def _ranges() -> dict[str, _Schema]:
    """The range of each number that nodes get, under every name that a request has for it."""
    found: dict[str, _Schema] = {}
    for name, hint in get_type_hints(DecodingParams, include_extras=True).items():
        for member in (hint, *get_args(hint)):
            for extra in getattr(member, "__metadata__", ()):
                if isinstance(extra, Bounds):
                    lowest = "exclusiveMinimum" if extra.low == math.ulp(0.0) else "minimum"
                    found[name] = {lowest: 0 if lowest != "minimum" else extra.low, "maximum": extra.high}
    return found | dict.fromkeys(_LIMITS_OF_OUTPUT, found["max_tokens"])
