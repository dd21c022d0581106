"""/docs: the document of /openapi.json as one page, made here.

The page holds no script and loads nothing, so it works without a network and asks nothing of a browser's trust.
"""

from __future__ import annotations

from html import escape
from typing import Any

CONTENT_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h2 { margin-top: 2rem; font-size: 1.1rem } code { font-family: ui-monospace, monospace }
table { border-collapse: collapse; width: 100% } td, th { text-align: left; padding: .2rem .8rem .2rem 0;
vertical-align: top; border-bottom: 1px solid #8884 } summary { cursor: pointer }
@media (prefers-color-scheme: dark) { body { background: #151515; color: #ddd } a { color: #8bf } }
"""


def docs_page(document: dict[str, Any], link: str = "openapi.json") -> str:
    """The page over an OpenAPI document, which is at `link` from there."""
    schemas = document["components"]["schemas"]
    operations = "".join(
        _operation(method, path, operation, schemas)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    )
    title = escape(document["info"]["title"])
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1>"
        f'<p>For programs: <a href="{link}">openapi.json</a></p>{operations}</body></html>'
    )


def _operation(method: str, path: str, operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    statuses = ", ".join(operation["responses"])
    head = f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(operation['summary'])}</p>"
    body = operation.get("requestBody")
    if body is None:
        return f"{head}<p>Answers: {statuses}</p>"
    schema = schemas[body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]]
    rows = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td>{escape(_shown(field))}</td>"
        f"<td>{'required' if name in schema.get('required', ()) else _default(field)}</td></tr>"
        for name, field in schema["properties"].items()
    )
    table = f"<table><tr><th>field</th><th>values</th><th>default</th></tr>{rows}</table>"
    return f"{head}<p>Answers: {statuses}</p><details><summary>Fields</summary>{table}</details>"


def _default(field: dict[str, Any]) -> str:
    default = field.get("default")
    return "" if default in (None, [], "") else escape(str(default))


def _shown(field: dict[str, Any]) -> str:
    """The values of a field in a few words."""
    if "description" in field and "enum" in field:
        return "not supported"
    if "anyOf" in field:
        return " or ".join(_shown(branch) for branch in field["anyOf"] if branch != {"type": "null"})
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    if "enum" in field or "const" in field:
        return ", ".join(str(value) for value in field.get("enum", [field.get("const")]))
    kind = str(field.get("type", "any"))
    if kind == "array":
        return f"array of {_shown(field.get('items', {}))}"
    low = field.get("minimum", field.get("exclusiveMinimum"))
    if "maximum" not in field:
        return kind
    return f"{kind}, {'above' if 'exclusiveMinimum' in field else 'from'} {low} to {field['maximum']}"
