"""Where the output of one request is in its grammar, and the grammars that this process has compiled.

Owns the matchers of live requests and a bounded cache of compiled grammars. A matcher depends on the grammar and the
tokens of the output alone, so any node can make it at any place of an output. Compiling runs in a thread, without
Python's lock: a request whose grammar is not compiled yet waits, and nothing waits with it.

Whatever goes wrong with a grammar, here or in llguidance, is the `error` of that one matcher: its masks are empty, no
token can be sampled, and its request fails. `OUT_OF_RESOURCES` and `WORN_OUT` are no fault of the grammar: it is
compiled anew when it is needed again, so another attempt, here or at another node, may go on.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from baton.engine.structured.ahead import Ahead, Place, has_bit
from baton.engine.structured.vocabulary import Vocabulary, require_sound
from baton.wire.errors import BatonError, InvalidRequest, RequestFailed
from baton.wire.grammar import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher

_log = logging.getLogger(__name__)
MAX_COMPILED = 32
OUT_OF_RESOURCES = "this node has no memory or no descriptor left to compile the grammar"
WORN_OUT = "the answers of this node have reached as many states of the grammar as it keeps"
_TOO_MANY_STATES = "too many states"
_NUM_THREADS = 2
_Result = TypeVar("_Result")


class FirstMatcher(NamedTuple):
    """A matcher before any token. It knows the ids below `num_tokens`, those of the tokenizer; models may have more,
    and it gives up when it is asked about these."""

    matcher: LLMatcher
    num_tokens: int


@dataclass(slots=True, eq=False)
class CompiledGrammar:
    """A grammar that was compiled. `first`: the matcher before any token, once it is there. Its `num_copies` copies
    share one lexer with it, and all states that any of them has reached.

    `is_worn`: a copy has found no room for another state. If there are others, whose states these may be, the grammar
    has to be compiled anew.
    """

    first: Future[FirstMatcher]
    num_copies: int = 0
    is_worn: bool = False

    def copy(self) -> LLMatcher:
        """A matcher before any token. Raises what compiling has raised."""
        self.num_copies += 1
        return self.first.result().matcher.deep_copy()

    @property
    def is_usable(self) -> bool:
        """Whether the grammar is compiled, or will be, or cannot be."""
        return not self.is_worn and not (self.first.done() and isinstance(self.first.exception(), RequestFailed))


class GrammarMatcher:
    """Follows one output. `output`: the tokens so far. See `baton.engine.scheduler.request.Matcher`.

    While it `_is_settled`, the library's matcher stands behind the output, and has set `is_complete` and
    `leaves_choice` there. A step asks about a token in one call, `accepts`: its state is in the caches then, and a call
    in Python costs about as much as one of the library. Forced tokens that follow each other, `_forced`, are read
    together, once the last of them was taken: nothing else may stand between them.
    """

    __slots__ = (
        "_accepted",
        "_ahead",
        "_compiled",
        "_forced",
        "_is_settled",
        "_mask",
        "_matcher",
        "_num_tokens",
        "_unread",
        "error",
        "is_complete",
        "leaves_choice",
    )

    def __init__(self, compiled: CompiledGrammar, output: Sequence[int]) -> None:
        self.error = ""
        self.is_complete = False
        self.leaves_choice = True
        self._compiled = compiled
        self._unread = list(output)
        self._forced: list[int] = []
        self._matcher: LLMatcher | None = None
        self._num_tokens = 0
        self._mask: bytes | None = None
        self._accepted: int | None = None
        self._is_settled = False
        self._ahead: Ahead | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the grammar was compiled, or could not be."""
        return self._compiled.first.done()

    def accepts(self, token_id: int) -> bool:
        """Whether this token may be next. If so, the library's matcher has taken it.

        The mask decides where the next byte is forced. It has the one token that a tokenizer would write, while the
        library accepts others that begin the same text.
        """
        if not (self._is_settled or self._settle()) or token_id >= self._num_tokens:
            return False
        if not self.leaves_choice and not has_bit(self.mask() or b"", token_id):
            return False
        matcher = self._matcher
        assert matcher is not None
        if not matcher.try_consume_tokens([token_id]):
            return False
        self.is_complete = matcher.is_stopped()
        self.leaves_choice = self.is_complete or not matcher.compute_ff_bytes()
        self._accepted, self._is_settled = token_id, False
        return True

    def goes_on_with(self, token_id: int) -> bool:
        """Whether `token_id` was taken last, and the grammar leaves a choice behind it."""
        return token_id == self._accepted and self.leaves_choice and not self.is_complete

    def take(self, token_id: int) -> None:
        """The output goes on with this token."""
        self._mask = None
        if token_id == self._accepted:
            self._accepted, self._is_settled = None, not self.error
            self._forced.clear()
            return
        if self._accepted is not None:
            self._settle()
        self._unread.append(token_id)
        if self._forced and self._forced.pop(0) != token_id:
            self._forced.clear()
        if self._forced:
            self._is_settled = False
        else:
            self._settle()

    def fork(self, output: Sequence[int]) -> GrammarMatcher:
        """A matcher of another output, in the same grammar."""
        return GrammarMatcher(self._compiled, output)

    def num_allowed(self, drafts: Sequence[int]) -> int:
        """How many of `drafts` may come next, up to the first that completes the output."""
        if not (self._is_settled or self._settle()):
            return 0
        assert self._matcher is not None
        if self._ahead is None:
            self._compiled.num_copies += 1  # the states that drafts reach are not those of the output
        # a new copy each time: one that has gone back and then takes other tokens was seen to allow what may not follow
        self._ahead = Ahead(self._matcher.deep_copy(), self._num_tokens)
        return self._ahead.num_allowed(drafts)

    def behind(self, number: int) -> Place:
        """The place behind so many of the drafts that were asked about last."""
        assert self._ahead is not None
        return Place(self._ahead, number)

    def mask(self) -> bytes | None:
        """A bit for each token id, the lowest first: whether it may be next. None: none may, see `error`."""
        if self._mask is None and (self._is_settled or self._settle()):
            matcher = self._matcher
            assert matcher is not None
            bits = matcher.compute_bitmask()
            if matcher.is_error():
                self._give_up(matcher)
            else:
                self._mask = bits
        return self._mask

    def forced_token(self) -> int | None:
        """The only token that the grammar allows next, or None where it leaves a choice."""
        if self._forced:
            return self._forced[0]
        # where the grammar leaves a choice of bytes, which costs little to ask, hardly ever one token alone fits
        if not (self._is_settled or self._settle()) or self.leaves_choice:
            return None
        matcher = self._matcher
        assert matcher is not None
        self._forced = matcher.compute_ff_tokens()
        if self._forced:  # a mask would have the first of these alone
            return self._forced[0]
        mask = self.mask()
        if mask is None:
            return None
        bits = int.from_bytes(mask, "little")
        return bits.bit_length() - 1 if bits and not bits & (bits - 1) else None

    def fail(self, reason: str) -> None:
        """No token can be sampled any more, and why."""
        self.error = self.error or reason
        self._mask, self._is_settled, self.is_complete = None, False, False
        self._forced.clear()

    def _settle(self) -> bool:
        """Have the library's matcher stand behind the output, and ask it what it says there. False after an error."""
        if self.error:
            return False
        if self._matcher is None:
            try:
                self._matcher = self._compiled.copy()
                self._num_tokens = self._compiled.first.result().num_tokens
            except BatonError as error:
                self.fail(error.message)
                return False
        elif self._accepted is not None:
            # it was accepted and not taken: a choice of the same prompt has drawn it, or its step was lost
            self._matcher.rollback(1)
        self._accepted = None
        if self._unread:
            if not self._matcher.consume_tokens(self._unread):
                self._give_up(self._matcher)
                return False
            self._unread.clear()
        self.is_complete = self._matcher.is_stopped()
        self.leaves_choice = self.is_complete or not self._matcher.compute_ff_bytes()
        self._is_settled = True
        return True

    def _give_up(self, matcher: LLMatcher) -> None:
        if _TOO_MANY_STATES in matcher.get_error():
            self._compiled.is_worn = True
            if self._compiled.num_copies > 1:
                self.fail(WORN_OUT)
        try:
            require_sound(matcher)
        except BatonError as error:
            self.fail(error.message)
        self.fail("a token does not fit")


class Grammars:
    """Makes matchers for one vocabulary, which `load` loads in a thread: when it is first needed, or earlier.

    Loading holds Python's lock, for a second or so with 150,000 tokens. Called by one thread. At most `MAX_COMPILED`
    grammars are kept.
    """

    def __init__(self, load: Callable[[], Vocabulary]) -> None:
        self._load = load
        self._loading = threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._compiled: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._threads: ThreadPoolExecutor | None = None
        self._early: Future[None] | None = None

    def begin_loading(self) -> None:
        """Load the vocabulary now. An error is told to the requests that need it."""
        self._early = self._submit(self._load_early)

    def finish_loading(self) -> None:
        """Wait until the vocabulary is loaded, if that was begun."""
        if self._early is not None:
            self._early.result()

    def prepare(self, grammar: Grammar) -> CompiledGrammar:
        """Begin to compile `grammar`, unless that was done."""
        found = self._compiled.get(grammar)
        if found is None or not found.is_usable:
            found = self._compiled[grammar] = CompiledGrammar(self._submit(self._compile, grammar))
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return found

    def matcher(self, grammar: Grammar, output: Sequence[int]) -> GrammarMatcher:
        """The matcher of a request with this output so far."""
        return GrammarMatcher(self.prepare(grammar), output)

    def _submit(self, call: Callable[..., _Result], *arguments: Grammar) -> Future[_Result]:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_NUM_THREADS, "grammars")
        try:
            return self._threads.submit(call, *arguments)
        except RuntimeError as error:  # the system has no thread for it; one that starts later does it in vain
            _log.warning("a grammar could not be compiled: %s", error)
            failed: Future[_Result] = Future()
            failed.set_exception(RequestFailed(OUT_OF_RESOURCES))
            return failed

    def _load_early(self) -> None:
        with contextlib.suppress(BatonError):
            self._loaded()

    def _loaded(self) -> Vocabulary:
        with self._loading:
            if self._vocabulary is None:
                self._vocabulary = self._load()
            return self._vocabulary

    def _compile(self, grammar: Grammar) -> FirstMatcher:
        try:
            vocabulary = self._loaded()
            return FirstMatcher(vocabulary.compile(grammar), vocabulary.tokens.vocab_size)
        except BatonError:
            raise
        except (OSError, MemoryError) as error:
            _log.warning("a grammar could not be compiled: %s", error)
            raise RequestFailed(OUT_OF_RESOURCES) from None
        except Exception as error:  # the outer edge of a thread: whatever it was, it fails the requests concerned
            _log.warning("a grammar could not be compiled: %s", type(error).__name__)
            raise InvalidRequest("the grammar could not be compiled", "grammar") from None
