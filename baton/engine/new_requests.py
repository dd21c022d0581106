"""What one model makes of what a program asks: a `Request`, which names the model in its hashes and is checked.

Owns what a request needs of the model and the scheduler does not: the fingerprint, the grammars and how images are
told apart in a prompt. Has no requests and no blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.engine.cache.hashing import root_hash
from baton.engine.models.vision.facts import ImageFacts, require_seen
from baton.engine.scheduler.request import Matcher, Request
from baton.engine.structured.matcher import Grammars
from baton.wire.errors import InvalidRequest
from baton.wire.images import PromptImage
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams


class NewRequests:
    """See the module. Without `grammars` requests with a grammar are refused, and those with images without
    `image_facts`."""

    def __init__(
        self, fingerprint: str, max_total_tokens: int, grammars: Grammars | None, image_facts: ImageFacts | None
    ) -> None:
        self._fingerprint = fingerprint
        self._max_total_tokens = max_total_tokens
        self._grammars = grammars
        self._image_facts = image_facts

    @property
    def see_images(self) -> bool:
        """Whether they may have images."""
        return self._image_facts is not None

    def hash_root(self, cache_salt: bytes) -> bytes:
        """What the hashes of a request's blocks begin with."""
        return root_hash(self._fingerprint, cache_salt)

    def prepare(self, params: DecodingParams) -> None:
        """Begin with what a request of these parameters needs before it can be computed: its grammar."""
        if params.grammar is not None and self._grammars is not None:
            self._grammars.prepare(params.grammar)

    def make(
        self,
        key: RequestKey,
        token_ids: Sequence[int],
        params: DecodingParams,
        num_prompt_tokens: int | None,
        cache_salt: bytes,
        images: Sequence[PromptImage],
    ) -> Request:
        """A new request, of whose `token_ids` the first `num_prompt_tokens` are its prompt (None: all). Raises
        `InvalidRequest` for what this engine does not serve."""
        if images:
            require_seen(self._image_facts, token_ids, images)
        num_prompt_tokens = len(token_ids) if num_prompt_tokens is None else num_prompt_tokens
        return Request(
            key=key,
            token_ids=list(token_ids),
            num_prompt_tokens=num_prompt_tokens,
            params=params,
            hash_root=self.hash_root(cache_salt),
            max_total_tokens=self._max_total_tokens,
            matcher=self._matcher(params, token_ids[num_prompt_tokens:]),
            images=tuple(images),
        )

    def _matcher(self, params: DecodingParams, output: Sequence[int]) -> Matcher | None:
        """The matcher of a request with this output so far."""
        if params.grammar is None:
            return None
        if self._grammars is None:
            raise InvalidRequest("this engine serves no answers of a given structure", "grammar")
        return self._grammars.matcher(params.grammar, output)
