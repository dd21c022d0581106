"""What was said, so that it can be found again, in the automata of `src/texts.h`.

Owns the calls, and when the memory behind them is given back. Does not know what is made of a match.

Invariant: a reader keeps the texts that it reads, so that they are there as long as it is.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Iterable
from ctypes import CDLL, POINTER, Structure, addressof, c_int32, c_int64, c_void_p

MAX_GUESSES = 64
_ONE = c_int64(1)
_NO_MEMORY = "no memory for texts"


class BatonGuess(Structure):
    """`BatonGuess` of texts.h: after the last `match` tokens something has followed `total` times, and `count` times it
    was this token. The guesses before it count in `match`."""

    _fields_ = [("token", c_int32), ("match", c_int32), ("count", c_int32), ("total", c_int32)]
    token: int
    match: int
    count: int
    total: int


class Texts:
    """Texts of which the newest `max_tokens` tokens of `max_texts` texts are kept: at most twice as many of both."""

    def __init__(self, library: CDLL, max_tokens: int, max_texts: int = 1 << 30, num_expected: int = 0) -> None:
        """`library`: of `baton.engine.native.library`. `num_expected`: tokens for which there is memory at once. Raises
        `MemoryError`."""
        library.baton_texts_open.argtypes = (c_int64, c_int64, c_int64)
        library.baton_texts_open.restype = c_void_p
        library.baton_texts_close.argtypes, library.baton_texts_close.restype = (c_void_p,), None
        library.baton_texts_size.argtypes, library.baton_texts_size.restype = (c_void_p,), c_int64
        library.baton_reader_open.argtypes, library.baton_reader_open.restype = (c_void_p,), c_void_p
        library.baton_reader_close.argtypes, library.baton_reader_close.restype = (c_void_p,), None
        library.baton_reader_read.restype = c_int32  # its arguments are made before: the call takes half the time so
        library.baton_reader_guess.argtypes = (c_void_p, POINTER(BatonGuess), c_int64)
        library.baton_reader_guess.restype = c_int64
        self.library = library
        self.handle = _opened(library.baton_texts_open(max_tokens, max_texts, num_expected))
        weakref.finalize(self, library.baton_texts_close, self.handle)

    @property
    def num_tokens(self) -> int:
        """How many tokens are kept. One takes some 100 bytes."""
        size: int = self.library.baton_texts_size(self.handle)
        return size


class TextReader:
    """Goes along a text, which it adds to `texts`, and follows the longest end of it that has been there before."""

    def __init__(self, texts: Texts) -> None:
        """Raises `MemoryError`."""
        self.first = BatonGuess()
        """What may be the next token; its `match` says how many of the last tokens have been there before."""
        self._texts = texts
        self._read = texts.library.baton_reader_read
        self._guess = texts.library.baton_reader_guess
        self._handle = _opened(texts.library.baton_reader_open(texts.handle))
        self._one = c_int32()
        self._place_of_one, self._place_of_first = c_void_p(addressof(self._one)), c_void_p(addressof(self.first))
        weakref.finalize(self, texts.library.baton_reader_close, self._handle)

    def read(self, token_ids: Iterable[int]) -> None:
        """The text goes on with these. Raises `MemoryError`, after which nothing of it may be used."""
        packed = array("i", token_ids)
        place, count = c_void_p(packed.buffer_info()[0]), c_int64(len(packed))
        if not self._read(self._handle, place, count, self._place_of_first):
            raise MemoryError(_NO_MEMORY)

    def read_one(self, token_id: int) -> None:
        """As `read`, in a microsecond."""
        self._one.value = token_id
        if not self._read(self._handle, self._place_of_one, _ONE, self._place_of_first):
            raise MemoryError(_NO_MEMORY)

    def guesses(self, max_guesses: int) -> list[BatonGuess]:
        """What has followed most often, token by token. Ends of the text are the shorter the less has followed."""
        found = (BatonGuess * min(max_guesses, MAX_GUESSES))()
        return found[: self._guess(self._handle, found, len(found))]


def _opened(handle: int | None) -> c_void_p:
    if not handle:
        raise MemoryError(_NO_MEMORY)
    return c_void_p(handle)
