"""Content with images: the parts of a message in their order, and what is accepted as the source of an image.

Owns the rule that an image comes in the request itself, as base64: no address is fetched and no file is opened,
whatever a client names. What the bytes hold is found out elsewhere (`baton.router.http.images`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from baton.router.http.openai.strict_json import shown

KINDS = ("image/png", "image/jpeg", "image/jpg", "image/webp", "image/gif")
DATA_URL = f"^data:({'|'.join(KINDS)});base64,"
"""The pattern of what `of_url` takes, for schemas."""
_DATA, _BASE64 = "data:", ";base64"


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image, its file in base64."""

    data: str


class SeenText(str):
    """The text of a message with images, its parts joined with newlines like those of any message. `parts`: texts and
    images in their order."""

    parts: tuple[str | ImagePart, ...]

    @classmethod
    def of(cls, parts: Sequence[str | ImagePart]) -> SeenText:
        """The content made of `parts`."""
        found = cls("\n".join(part for part in parts if isinstance(part, str)))
        found.parts = tuple(parts)
        return found


def joined(parts: Sequence[str | ImagePart]) -> str:
    """The content made of `parts`: with images, or a text alone."""
    if any(isinstance(part, ImagePart) for part in parts):
        return SeenText.of(parts)
    return "\n".join(part for part in parts if isinstance(part, str))


def images_of(content: str | None) -> list[str]:
    """The files of the images in some content, in base64."""
    parts = content.parts if isinstance(content, SeenText) else ()
    return [part.data for part in parts if isinstance(part, ImagePart)]


def for_template(content: str | None) -> object:
    """Content as chat templates know it: a text, or parts where there are images."""
    if not isinstance(content, SeenText):
        return content
    return [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in content.parts]


def of_url(url: Any) -> ImagePart:
    """The image in a `data:` URL. Raises `ValueError` with the rest of a sentence."""
    if not isinstance(url, str):
        raise ValueError("must be a string")
    if not url[: len(_DATA)].lower() == _DATA:
        raise ValueError("must be a data: URL with base64: images are not fetched")
    head, comma, data = url[len(_DATA) :].partition(",")
    if not comma or not head.lower().endswith(_BASE64):
        raise ValueError("must be a data: URL with base64")
    return of_source(head[: -len(_BASE64)].partition(";")[0], data)


def of_source(kind: Any, data: Any) -> ImagePart:
    """The image of that media type. Raises `ValueError` with the rest of a sentence."""
    if not isinstance(kind, str) or kind.lower() not in KINDS:
        raise ValueError(f"is {shown(kind)}: an image must be one of {', '.join(KINDS)}")
    if not isinstance(data, str) or not data:
        raise ValueError("must hold the image in base64")
    return ImagePart(data)
