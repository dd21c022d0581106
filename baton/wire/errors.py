"""The one error tree of Baton.

    BatonError
    ├── InvalidRequest          the client's mistake: answered with a 4xx, never retried
    │   ├── ContextLengthExceeded
    │   ├── ConversationNotFound
    │   ├── ModelNotFound
    │   ├── ResponseNotFound
    │   ├── StreamNotFound
    │   └── UnsupportedMediaType
    ├── Overloaded              no room now: try again later
    │   └── RateLimited         a limit of the client's own API key
    ├── NoNode                  no node is registered that could do this
    ├── RequestFailed           every attempt at a request failed
    │   └── DeadlineExceeded
    ├── Refused                 two programs do not fit together (handshake)
    ├── InvalidMessage          a control message that cannot be what its sender meant
    ├── TransferFailed          a handoff whose bytes cannot be trusted or did not arrive
    ├── InvalidSetting          a flag, environment name or file value that cannot be used
    ├── ModelLoadError          a checkpoint that cannot be loaded
    └── ChildFailed             a process that this one started did not do its work

Each class has a stable `code`: codes are interface and never change. The router maps classes to HTTP in one table
(`router/http/openai/errors.py`); a node sends code and message to the router, which makes an error of `remote_error`.
"""

from __future__ import annotations


class BatonError(Exception):
    """Root of all errors that Baton raises on purpose. `str(error)` is one sentence for a person."""

    code = "internal_error"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidRequest(BatonError):
    """A request that can never succeed as it is. `param` names the offending field in the client's own spelling."""

    code = "invalid_value"

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        if code is not None:
            self.code = code


class ContextLengthExceeded(InvalidRequest):
    """Prompt (plus requested output) does not fit the model's context or the node's KV pool."""

    code = "context_length_exceeded"


class ModelNotFound(InvalidRequest):
    """The request names a model that this endpoint does not serve."""

    code = "model_not_found"


class StreamNotFound(InvalidRequest):
    """The request resumes a stream that is not known, or not any more."""

    code = "stream_not_found"


class ResponseNotFound(InvalidRequest):
    """The request names a response that is not stored for its API key, or not any more."""

    code = "response_not_found"


class ConversationNotFound(InvalidRequest):
    """The request names a conversation, or an item of one, that is not stored for its API key, or not any more."""

    code = "conversation_not_found"


class UnsupportedMediaType(InvalidRequest):
    """The body is of a content type, charset or encoding that this endpoint does not read."""

    code = "unsupported_media_type"


class Overloaded(BatonError):
    """A bounded queue is full, or the program is draining. Safe to try again after `retry_after_s`."""

    code = "overloaded"

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RateLimited(Overloaded):
    """The client's API key has used up one of its limits. `limit` names it, as the key file does."""

    code = "rate_limited"

    def __init__(self, message: str, limit: str, retry_after_s: int = 1) -> None:
        super().__init__(message, retry_after_s)
        self.limit = limit


class NoNode(Overloaded):
    """No registered node can take this request."""

    code = "no_node"


class RequestFailed(BatonError):
    """A request that was accepted but could not be finished. `cause_code` is the code of the last attempt's error."""

    code = "request_failed"

    def __init__(self, message: str, cause_code: str = "") -> None:
        super().__init__(message)
        self.cause_code = cause_code


class DeadlineExceeded(RequestFailed):
    """The request's own deadline passed."""

    code = "deadline_exceeded"


class Refused(BatonError):
    """A handshake found that two programs do not fit: the message names both values."""

    code = "refused"


class InvalidMessage(BatonError):
    """Bytes that do not decode to a known, valid message. At most, the sender's connection is closed."""

    code = "invalid_message"


class TransferFailed(BatonError):
    """KV of one handoff is incomplete, stale or damaged. Such KV is never used: the prompt is computed again."""

    code = "transfer_failed"


class InvalidSetting(BatonError):
    """A setting that cannot be used; the message names it, its value and what is allowed."""

    code = "invalid_setting"


class ModelLoadError(BatonError):
    """A checkpoint that cannot be found, is incomplete, damaged, or of an unsupported architecture."""

    code = "model_load_error"


class ChildFailed(BatonError):
    """A child process that did not start, did not answer in time, or has ended."""

    code = "child_failed"


def remote_error(code: str, message: str) -> BatonError:
    """The error that another program reported: the client's mistakes keep their class, the rest are failed attempts."""
    if code == ContextLengthExceeded.code:
        return ContextLengthExceeded(message)
    if code == InvalidRequest.code:
        return InvalidRequest(message)
    if code == Overloaded.code:
        return Overloaded(message)
    return RequestFailed(message, code)
