"""Fields that a request may carry and that change nothing: what is ignored, why, and what the answer says about it.

Owns the tables of such fields, each with its reason and with the values that ask for nothing, and the notes of one
request. The rules: a field that only tags a request, or tunes what Baton does not have, is ignored with a warning; so
is one that nobody knows, because clients send such fields and break when a server refuses them; one that reaches for
the inside of the relay is refused. A strict router refuses all of them. Does not know the fields that are used
(`schemas`) nor those that are refused because the answer would be another one (`unsupported`).

Invariant: whatever a request holds, its warnings and the labels of its metric are few and short.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from baton.router.http.openai.strict_json import member_path
from baton.router.http.openai.unsupported import is_harmless

UNKNOWN, STRICT = "unknown_parameter", "unsupported_parameter"
"""The codes with which a field is refused that is in no table, and one that only a strict router refuses."""

OTHER = "other"
"""The label that stands for all fields that are in no table."""

UNKNOWN_REASON = "this endpoint knows no such field"
_MAX_WARNINGS = 16


class Ignored(NamedTuple):
    """A field that changes nothing: why, and the values (besides null) that call for no warning."""

    reason: str
    neutral: tuple[object, ...] = ()


IgnoredTable = Mapping[str, Ignored]

_TAG = Ignored("it is a tag, and Baton keeps no tags")
_CACHED = Ignored("prefixes are cached without being marked")
_OTHER_SERVER = Ignored("these are settings of another server")

COMMON: IgnoredTable = {
    # OpenAI
    "metadata": _TAG,
    "moderation": Ignored("Baton moderates nothing"),
    "prompt_cache_key": Ignored("a prefix is found by its tokens"),
    "prompt_cache_options": Ignored("how long a prefix is cached is not up to a request"),
    "prompt_cache_retention": Ignored("how long a prefix is cached is not up to a request", ("in_memory",)),
    "safety_identifier": _TAG,
    "service_tier": Ignored("there is one tier of service", ("auto", "default")),
    "store": Ignored("answers of this endpoint are not stored", (False,)),
    "user": _TAG,
    # vLLM
    "guided_decoding_backend": Ignored("there is one that compiles grammars"),
    "return_mm_kwargs": Ignored("it concerns images, which are not told back", (True,)),
    "return_token_offsets": Ignored("it concerns vLLM's render endpoints", (False,)),
    "session_id": _TAG,
    "spaces_between_special_tokens": Ignored("both values give the same text", (True, False)),
    "stream_interval": Ignored("every token is streamed when it comes", (1,)),
    # others
    "cache_control": _CACHED,
    "chat_id": _TAG,
    "conversation_id": _TAG,
    "enable_thinking": Ignored("put it into chat_template_kwargs"),
    "extra_body": Ignored("it is an argument of a client library: its members belong into the body itself", ({},)),
    "id": _TAG,
    "keep_alive": Ignored("the model stays loaded"),
    "message_id": _TAG,
    "options": _OTHER_SERVER,
    "opts": _OTHER_SERVER,
    "think": Ignored("set enable_thinking in chat_template_kwargs"),
    "thinking": Ignored("set enable_thinking in chat_template_kwargs"),
}

CHAT: IgnoredTable = {
    "verbosity": Ignored("models are told in the conversation how much to say"),
}

COMPLETION: IgnoredTable = {
    "max_completion_tokens": Ignored("this endpoint takes max_tokens"),
}

MESSAGE: IgnoredTable = {
    "annotations": Ignored("only the text of a message reaches the model", ([],)),
    "cache_control": _CACHED,
    "created_at": _TAG,
    "id": _TAG,
    "metadata": _TAG,
    "timestamp": _TAG,
    "weight": Ignored("it concerns training"),
}

TEXT_PART: IgnoredTable = {
    "annotations": Ignored("only the text of a message reaches the model", ([],)),
    "cache_control": _CACHED,
    "id": _TAG,
}

IMAGE_URL: IgnoredTable = {
    "detail": Ignored("an image has the size that the model's image processor gives it", ("auto",)),
    "uuid": Ignored("an image is known by what it shows"),
}

STREAM_OPTIONS: IgnoredTable = {
    "include_obfuscation": Ignored("events are not padded", (False,)),
}

INTERNAL = (
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "cache_hit_threshold",
    "data_parallel_rank",
    "disagg_prefill_dp_rank",
    "disaggregated_params",
    "ec_transfer_params",
    "kv_transfer_params",
    "request_id",
    "rid",
)
"""What servers say to each other about a request. No public request may set it."""

_INTERNAL_PREFIXES = ("bootstrap_", "disagg", "do_remote_", "ec_transfer", "kv_transfer", "remote_")


class IgnoredFields:
    """What one request carries that changes nothing. A strict router refuses it instead."""

    def __init__(self, is_strict: bool = False) -> None:
        self._is_strict = is_strict
        self._reasons: dict[str, str] = {}
        self._labels: set[str] = set()
        self._has_more = False

    def ignore(self, name: str, value: Any, table: IgnoredTable, place: str = "") -> str | None:
        """Note that the member `name` of the object at `place` ("", or "messages[]" and such) changes nothing.

        Returns the code of the error with which the request has to be refused instead, None when it has not.
        """
        rule = table.get(name)
        if rule is None:
            if self._is_strict or (value is not None and _is_internal(name)):
                return UNKNOWN
            if value is not None:
                self._add(member_path(place, name), UNKNOWN_REASON, OTHER)
        elif not is_harmless(value, rule.neutral):
            if self._is_strict:
                return STRICT
            path = member_path(place, name)
            self._add(path, rule.reason, path)
        return None

    @property
    def labels(self) -> frozenset[str]:
        """The ignored fields as labels of a metric: names of the tables, and `OTHER`."""
        return frozenset(self._labels)

    @property
    def warnings(self) -> tuple[str, ...]:
        """One sentence for each ignored field, however often it came."""
        more = ("further fields were ignored",) if self._has_more else ()
        return (*(f"{path} is ignored: {reason}" for path, reason in self._reasons.items()), *more)

    def _add(self, path: str, reason: str, label: str) -> None:
        self._labels.add(label)
        if path not in self._reasons and len(self._reasons) == _MAX_WARNINGS:
            self._has_more = True
        else:
            self._reasons[path] = reason


def _is_internal(name: str) -> bool:
    return name in INTERNAL or name.startswith(_INTERNAL_PREFIXES)
