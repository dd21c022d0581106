"""Types of fields that several messages between router and nodes have, with their bounds."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from baton.wire.codec import Bounds, Length

Name: TypeAlias = Annotated[str, Length(128)]
Names: TypeAlias = Annotated[tuple[Name, ...], Length(16)]
Text: TypeAlias = Annotated[str, Length(1024)]
Count: TypeAlias = Annotated[int, Bounds(0, 2**40)]
Attempt: TypeAlias = Annotated[int, Bounds(1, 10**6)]
