"""Schemas of the answers, as /openapi.json shows them: the members a client may rely on. More may follow them."""

from __future__ import annotations

from typing import Any

_Schema = dict[str, Any]
_STRING: _Schema = {"type": "string"}
_INTEGER: _Schema = {"type": "integer"}
_NUMBER: _Schema = {"type": "number"}
_NULLABLE_STRING: _Schema = {"type": ["string", "null"]}


def _object(**properties: _Schema) -> _Schema:
    """An object that has at least these members."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def _array(items: _Schema) -> _Schema:
    return {"type": "array", "items": items}


def _or_null(schema: _Schema) -> _Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _ref(name: str) -> _Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _answer(kind: str, choice: _Schema) -> _Schema:
    return _object(
        id=_STRING,
        object={"const": kind},
        created=_INTEGER,
        model=_STRING,
        choices=_array(choice),
        usage=_ref("Usage"),
    )


_FINISH: _Schema = {"enum": ["stop", "length", "tool_calls"]}
_LOGPROBS = _or_null({"type": "object"})

_OUTPUT_ITEMS = [
    _object(
        id=_STRING,
        type={"const": "message"},
        role={"const": "assistant"},
        status=_STRING,
        content=_array(
            _object(
                type={"const": "output_text"},
                text=_STRING,
                annotations=_array({}),
                logprobs=_array({"type": "object"}),
            )
        ),
    ),
    _object(
        id=_STRING,
        type={"const": "reasoning"},
        status=_STRING,
        content=_array(_object(type={"const": "reasoning_text"}, text=_STRING)),
    ),
    _object(
        id=_STRING, type={"const": "function_call"}, status=_STRING, call_id=_STRING, name=_STRING, arguments=_STRING
    ),
]
_CONTENT_BLOCKS = [
    _object(type={"const": "text"}, text=_STRING),
    _object(type={"const": "thinking"}, thinking=_STRING, signature=_STRING),
    _object(type={"const": "tool_use"}, id=_STRING, name=_STRING, input={"type": "object"}),
]

ANSWERS: dict[str, _Schema] = {
    "Error": _object(error=_object(message=_STRING, type=_STRING, param=_NULLABLE_STRING, code=_NULLABLE_STRING)),
    "Usage": _object(
        prompt_tokens=_INTEGER,
        completion_tokens=_INTEGER,
        total_tokens=_INTEGER,
        prompt_tokens_details=_object(cached_tokens=_INTEGER),
    ),
    "ChatCompletion": _answer(
        "chat.completion",
        _object(
            index=_INTEGER,
            message=_object(role={"const": "assistant"}, content=_NULLABLE_STRING),
            logprobs=_LOGPROBS,
            finish_reason=_FINISH,
        ),
    ),
    "Completion": _answer(
        "text_completion", _object(index=_INTEGER, text=_STRING, logprobs=_LOGPROBS, finish_reason=_FINISH)
    ),
    "Response": _object(
        id=_STRING,
        object={"const": "response"},
        created_at=_INTEGER,
        status={"enum": ["completed", "incomplete"]},
        incomplete_details=_or_null(_object(reason={"const": "max_output_tokens"})),
        model=_STRING,
        output=_array({"anyOf": _OUTPUT_ITEMS}),
        usage=_object(
            input_tokens=_INTEGER,
            input_tokens_details=_object(cached_tokens=_INTEGER),
            output_tokens=_INTEGER,
            output_tokens_details=_object(reasoning_tokens=_INTEGER),
            total_tokens=_INTEGER,
        ),
        temperature=_NUMBER,
        top_p=_NUMBER,
    ),
    "DeletedResponse": _object(id=_STRING, object={"const": "response"}, deleted={"const": True}),
    "Conversation": _object(
        id=_STRING, object={"const": "conversation"}, created_at=_INTEGER, metadata={"type": "object"}
    ),
    "DeletedConversation": _object(id=_STRING, object={"const": "conversation.deleted"}, deleted={"const": True}),
    "ResponseItem": _object(id=_STRING, type=_STRING),
    "ResponseItems": _object(
        object={"const": "list"},
        data=_array(_ref("ResponseItem")),
        first_id=_NULLABLE_STRING,
        last_id=_NULLABLE_STRING,
        has_more={"type": "boolean"},
    ),
    "AnthropicMessage": _object(
        id=_STRING,
        type={"const": "message"},
        role={"const": "assistant"},
        model=_STRING,
        content=_array({"anyOf": _CONTENT_BLOCKS}),
        stop_reason={"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
        stop_sequence=_NULLABLE_STRING,
        usage=_object(input_tokens=_INTEGER, cache_read_input_tokens=_INTEGER, output_tokens=_INTEGER),
    ),
    "AnthropicTokenCount": _object(input_tokens=_INTEGER),
    "AnthropicError": _object(
        type={"const": "error"}, error=_object(type=_STRING, message=_STRING), request_id=_STRING
    ),
    "Model": _object(
        id=_STRING,
        object={"const": "model"},
        created=_INTEGER,
        owned_by=_STRING,
        root=_STRING,
        input_modalities=_array({"enum": ["text", "image"]}),
        thinking_switches=_array({"enum": ["enable_thinking", "thinking", "reasoning_effort"]}),
    ),
    "ModelList": _object(object={"const": "list"}, data=_array(_ref("Model"))),
    "Health": _object(status={"enum": ["ok", "not ready"]}, nodes=_object(prefill=_INTEGER, decode=_INTEGER)),
}
