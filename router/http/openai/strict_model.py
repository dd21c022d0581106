"""What all objects of a request have in common: strict types, and fields that are used, ignored or refused."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationInfo, model_validator

from baton.router.http.openai import ignored
from baton.router.http.openai.fields import REFUSED, UNSUPPORTED, field_error, ignored_fields_of
from baton.router.http.openai.unsupported import REASONS, Table, is_harmless


class Strict(BaseModel):
    """Common behaviour: strict types, null is the default, unsupported, ignored and unknown fields are told apart.

    `place`: where such an object is in a request. `refuses_unknown`: an unknown field is refused by every router.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, hide_input_in_errors=True)

    unsupported: ClassVar[Table] = {}
    ignorable: ClassVar[ignored.IgnoredTable] = {}
    place: ClassVar[str] = ""
    refuses_unknown: ClassVar[bool] = False

    @model_validator(mode="before")
    @classmethod
    def _drop_what_changes_nothing(cls, members: Any, info: ValidationInfo) -> Any:
        if not isinstance(members, dict):
            raise field_error("must be an object")
        notes = ignored_fields_of(info)
        return {name: value for name, value in members.items() if cls._is_used(name, value, notes)}

    @classmethod
    def _is_used(cls, name: str, value: Any, notes: ignored.IgnoredFields) -> bool:
        is_field = name in cls.model_fields
        if name in cls.unsupported:
            if not is_harmless(value, cls.unsupported[name]):
                raise field_error(REASONS.get(name, "is not supported"), (name,), UNSUPPORTED)
            return False
        if name in cls.ignorable or not is_field:
            is_refused = cls.refuses_unknown and name not in cls.ignorable
            code = ignored.UNKNOWN if is_refused else notes.ignore(name, value, cls.ignorable, cls.place)
            if code is not None:
                raise field_error(REFUSED[code], (name,), code)
        return is_field and value is not None
