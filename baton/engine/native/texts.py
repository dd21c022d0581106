"""What was said, so that it can be found again, in the automata of `src/texts.h`.

Owns the calls, and when the memory behind them is given back. Does not know what is made of a match.

Invariant: a reader keeps the texts that it reads, so that they are there as long as it is.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Sequence
from ctypes import CDLL, POINTER, Structure, c_int32, c_int64, c_void_p
from typing import NamedTuple

MAX_GUESSES = 64
_WIDTH = array("i").itemsize


class BatonGuess(Structure):
    """`BatonGuess` of texts.h."""

    _fields_ = [("token", c_int32), ("match", c_int32), ("count", c_int32), ("total", c_int32)]


class Guess(NamedTuple):
    """After the last `match` tokens something has followed `total` times, and `count` times it was `token_id`. The
    tokens before it that are guesses count in `match`."""

    token_id: int
    match: int
    count: int
    total: int


class Texts:
    """Texts of which the newest `max_tokens` tokens are kept, of `max_texts` texts: at most twice as many of both."""

    def __init__(self, library: CDLL, max_tokens: int, max_texts: int = 1 << 30) -> None:
        """`library`: of `baton.engine.native.library`. Raises `MemoryError`."""
        self.library = library
        self.handle = c_void_p(_texts_open(library, max_tokens, max_texts))
        weakref.finalize(self, library.baton_texts_close, self.handle)

    @property
    def num_tokens(self) -> int:
        """The tokens of its texts, which take some 100 bytes each."""
        size: int = self.library.baton_texts_size(self.handle)
        return size


class TextReader:
    """Goes along one text, which it adds to `texts`, and follows the longest end of it that was there before."""

    def __init__(self, texts: Texts) -> None:
        """Raises `MemoryError`."""
        self.match = 0
        """How many of the last tokens were there before."""
        self._texts = texts
        self._handle = c_void_p(texts.library.baton_reader_open(texts.handle))
        if not self._handle:
            raise MemoryError("no reader of texts")
        weakref.finalize(self, texts.library.baton_reader_close, self._handle)
        self._read = texts.library.baton_reader_read
        self._guess = texts.library.baton_reader_guess
        self._guesses = (BatonGuess * MAX_GUESSES)()
        self._one = c_int32()

    def read(self, token_ids: Sequence[int]) -> None:
        """The text goes on with these. Raises `MemoryError`: afterwards neither this nor the texts may be used."""
        packed = array("i", token_ids)
        self._take(self._read(self._handle, packed.buffer_info()[0], len(packed)))

    def read_one(self, token_id: int) -> None:
        """As `read`."""
