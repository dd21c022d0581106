"""Turns the strings of a vocabulary into text, piece by piece, exactly as the tokenizer's own decoder does
on the whole.

Owns a streaming form of each decoder that generative checkpoints use. A decoder (the `decoder` entry of
`tokenizer.json`) maps a list of token strings to a list of strings that are then joined. A `Stage` does the
same for a list that arrives in parts. Invariant of every stage: what was returned never changes, whatever
follows; what may still change is held back.

Knows no token ids, no special tokens and no prompts.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Protocol

from baton.wire.errors import ModelLoadError

REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_of_char() -> dict[str, int]:
    """Byte-level BPE writes bytes as printable characters: those of Latin-1 stand for themselves, the
    others are moved, in order, to 256 and above (the table of GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(moved)}


_BYTE_OF_CHAR = _byte_of_char()


@lru_cache(maxsize=2**16)
def byte_level_bytes(piece: str) -> bytes:
    """The bytes of a byte-level token; a piece with any other character (an added token) stands for its own
    UTF-8."""
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in piece])
    except KeyError:
        return piece.encode()


def _continues(beginning: bytes, byte: int) -> bool:
    """Whether `byte` can come next in the character that `beginning` begins."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(beginning + bytes([byte]))
    except UnicodeDecodeError:
        return False
    return True


def fallback_byte(piece: str) -> bytes | None:
    """The byte of a token such as `<0xE2>`, None for every other token."""
    match = _BYTE_TOKEN.fullmatch(piece)
    return bytes.fromhex(match[1]) if match else None


class Stage(Protocol):
    """One step of a decoder over a list of strings that arrives in parts."""

    def push(self, pieces: list[str]) -> list[str]:
        """Take the next pieces, return what is final."""
        ...

    def flush(self) -> list[str]:
        """End the text: return what was held back."""
        ...

    def settle(self) -> list[str]:
        """End the prompt here; another text follows. Returns what was held back and is complete by itself, and keeps
        only the beginning of an unfinished character.

        If the next text finishes that character, it begins with it. Otherwise the beginning belongs to the prompt alone
        and is forgotten.
        """
        ...


class _Immediate:
    """Base of the stages that never hold anything back."""

    def flush(self) -> list[str]:
        return []

    def settle(self) -> list[str]:
        return []


class ByteLevel:
    """Tokens are bytes; invalid UTF-8 becomes U+FFFD per maximal invalid part (the Unicode
    recommendation)."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._before = b""

    def push(self, pieces: list[str]) -> list[str]:
        data = b"".join(map(byte_level_bytes, pieces))
        if self._before and data:
            if not _continues(self._before, data[0]):
                self._utf8.reset()
            self._before = b""
        return [self._utf8.decode(data)]

    def flush(self) -> list[str]:
        if self._before:
            return []  # the text ends before it has begun, and these bytes are not its own
        return [self._utf8.decode(b"", final=True)]

    def settle(self) -> list[str]:
        self._before = self._utf8.getstate()[0]  # nothing but the bytes of an unfinished character
        return []


class ByteFallback:
    """Decodes runs of neighbouring byte tokens. A run is text if all of it is valid UTF-8, otherwise one U+FFFD for
    each byte.

    The last byte can still turn a whole run into U+FFFD, so a run is held until a token of another kind ends it.
    """

    def __init__(self) -> None:
        self._run = bytearray()
        self._num_before = 0

    def push(self, pieces: list[str]) -> list[str]:
        final: list[str] = []
        for piece in pieces:
            byte = fallback_byte(piece)
            if byte is None:
                final += self.flush()
                final.append(piece)
            else:
                self._run += byte
        return final

    def flush(self) -> list[str]:
        run, before = bytes(self._run), self._num_before
        self._run.clear()
        self._num_before = 0
        for start in (0, before) if before else (0,):
            try:
                text = run[start:].decode()
            except UnicodeDecodeError:
                continue
            return [text] if text else []
        return [REPLACEMENT] * (len(run) - before)

    def settle(self) -> list[str]:
        utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        complete = utf8.decode(bytes(self._run))
        self._run = bytearray(utf8.getstate()[0])
        self._num_before = len(self._run)
        return [complete] if complete else []


class Replace(_Immediate):
    """Replaces a fixed string within each piece."""

    def __init__(self, pattern: str, content: str) -> None:
        self._pattern = pattern
        self._content = content

    def push(self, pieces: list[str]) -> list[str]:
        return [piece.replace(self._pattern, self._content) for piece in pieces]


class Metaspace(_Immediate):
    """The replacement character is a space, except in the very first piece when encoding had put it there."""

    def __init__(self, replacement: str, drops_first: bool) -> None:
        self._replacement = replacement
        self._drops_next = drops_first

    def push(self, pieces: list[str]) -> list[str]:
        final: list[str] = []
        for piece in pieces:
            final.append(piece.replace(self._replacement, "" if self._drops_next else " "))
            self._drops_next = False
        return final


class StripEach(_Immediate):
    """Cuts up to `start` leading and `stop` trailing `content` characters off each piece."""

    def __init__(self, content: str, start: int, stop: int) -> None:
        self._content = content
        self._start = start
        self._stop = stop

    def push(self, pieces: list[str]) -> list[str]:
        return [self._strip(piece) for piece in pieces]

    def _strip(self, piece: str) -> str:
        start, stop = 0, len(piece)
        while start < min(self._start, len(piece)) and piece[start] == self._content:
            start += 1
        while len(piece) - stop < self._stop and stop > start and piece[stop - 1] == self._content:
            stop -= 1
        return piece[start:stop]


class StripBeginning(_Immediate):
    """Cuts up to `start` leading `content` characters off the whole text."""

    def __init__(self, content: str, start: int) -> None:
        self._content = content
        self._num_left = start

    def push(self, pieces: list[str]) -> list[str]:
        text = "".join(pieces)
        while self._num_left and text:
            if not text.startswith(self._content):
                self._num_left = 0
                break
            text = text[len(self._content) :]
            self._num_left -= 1
        return [text]


class JoinWithSpaces(_Immediate):
    """Joins token strings with spaces, as a tokenizer without a decoder does."""

    def __init__(self) -> None:
        self._separator = ""

    def push(self, pieces: list[str]) -> list[str]:
        final: list[str] = []
        for piece in pieces:
            final.append(self._separator + piece)
            self._separator = " "
        return final


def build_stages(spec: Mapping[str, object] | None) -> list[Stage]:
    """Fresh stages for the `decoder` entry of `tokenizer.json` (None: it has none).

    Raises:
        ModelLoadError: for a decoder that generative checkpoints do not use and that cannot be streamed
        exactly.
    """
    if spec is None:
        return [JoinWithSpaces()]
    stages: list[Stage] = []
    is_fused = False
    for part in _flatten(spec):
        if part.get("type") in ("ByteLevel", "Fuse"):
            is_fused = True
        if part.get("type") != "Fuse":
            stages.append(_build_stage(part, is_fused))
    return stages


def _flatten(spec: Mapping[str, object]) -> list[Mapping[str, object]]:
    parts = spec.get("decoders")
    if spec.get("type") != "Sequence" or not isinstance(parts, list):
        return [spec]
    return [flat for part in parts for flat in _flatten(part)]


def _build_stage(part: Mapping[str, object], is_fused: bool) -> Stage:
    """One stage; `is_fused` says that the pieces before it are already one text."""
    match part:
        case {"type": "ByteLevel"}:
            return ByteLevel()
        case {"type": "ByteFallback"}:
            return ByteFallback()
        case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)} if (
            len(pattern) == 1 or not is_fused
        ):
            return Replace(pattern, content)
        case {"type": "Metaspace", "replacement": str(replacement)}:
            return Metaspace(replacement, drops_first=part.get("prepend_scheme", "always") != "never")
        case {"type": "Strip", "content": str(content), "start": int(start), "stop": int(stop)}:
            if not is_fused:
                return StripEach(content, start, stop)
            if stop == 0:
                return StripBeginning(content, start)
        case _:
            pass
    raise ModelLoadError(f"tokenizer.json has a decoder that is not supported: {dict(part)}")
